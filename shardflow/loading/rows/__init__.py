"""Rows of the plan: which samples of which datasets (selection, blend_file), how often (weighting), cut how.

``windows`` cuts volumes and conversations into rows, and ``lock`` holds the versions that a resume must find.
"""
