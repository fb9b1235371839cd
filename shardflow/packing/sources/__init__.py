"""Sources: readers of images, reports and attachments.

`dicom`, `nifti` and `raster` read pixels, `reports` and `documents` read text, and `layouts` finds out which
study an input belongs to. The reasons for which an input is not packed are part of the format
(`shardflow.format.reasons`).
"""
