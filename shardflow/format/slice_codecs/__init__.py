"""Codecs of image slices, one module each."""
