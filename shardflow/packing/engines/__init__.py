"""Execution engines: local processes or a Ray cluster run the same tasks."""
