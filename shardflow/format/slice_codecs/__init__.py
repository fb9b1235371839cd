"""Codecs of image slices, a module each."""
