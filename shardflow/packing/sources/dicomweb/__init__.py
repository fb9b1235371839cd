"""Source of images: an archive that speaks DICOMweb (QIDO-RS and WADO-RS of DICOM PS3.18).

Files are fetched into a folder as the archive stores them, and packed from there like any others.
"""
