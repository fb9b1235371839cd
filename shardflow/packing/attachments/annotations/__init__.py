"""Annotations: regions drawn by people or models, in the slices and pixels of the stored images.

A reader for each source (`dicom_seg`, `dicom_drawings`, `nifti_mask`, `box_files`) finds the slices and
series of a region (`targets`, `geometry`) and passes it to a `region_writer`, which makes the entries of
``annotations.json`` and the masks. `kinds` registers the readers with packing. See docs/attachments.md.
"""
