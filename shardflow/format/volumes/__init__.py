"""Volumes stored in bricks: one frame per series, its table, and reading any region of it."""
