"""``make demo``: from DICOM files to a training run that was killed, resumed on fewer processes, and checked.

The demo uses what any user has: the console script and files. Only the
reports are its own (`studies`): the bundled studies come without any.
"""
