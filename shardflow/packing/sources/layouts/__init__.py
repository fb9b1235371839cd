"""Layouts: from folders and tables as their owners keep them to images, reports, links and splits.

A layout assigns an image to a patient and study (`Placement`), reads the reports so that each names its
study, and knows the official splits. It has no influence on pixels. Installed packages add layouts as entry
points of the group ``shardflow.layouts``.
"""
