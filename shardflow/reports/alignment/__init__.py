"""Alignment of report findings with the slices that show them, by weighted rules.

Each answer has a confidence and its evidence. Inputs and output are plain JSON objects: ``study.json``,
``report.json`` and ``annotations.json`` become ``alignment.json`` (docs/format.md, section 4).
"""
