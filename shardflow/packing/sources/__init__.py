"""Sources: readers of images, reports and attachments.

`images` reads pixels (`dicom`, `nifti` and `slides` those of their formats), `reports` and `documents` read
text, and `layouts` finds out which study an input belongs to. The reasons for which an input is not packed
are part of the format (`shardflow.format.reasons`).
"""
