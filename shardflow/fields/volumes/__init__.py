"""Volumes: any region of a series, in its own grid or in another one, with what is marked in it."""
