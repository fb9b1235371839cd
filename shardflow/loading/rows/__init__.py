"""Rows of the plan: samples of one or more datasets, and how often each is drawn.

``selection`` and ``blend_file`` choose the samples, ``weighting`` their frequency. ``windows`` cuts volumes
and conversations into rows, and ``lock`` records the versions that a resume must find.
"""
