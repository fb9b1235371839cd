"""Tables of facts beside a dataset: of series, studies and voxels, and the columns that expressions read."""
