"""Whole-slide images: the levels of DICOM series and of TIFF pyramids, tile by tile."""
