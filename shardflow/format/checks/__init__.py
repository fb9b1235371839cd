"""Checks of a dataset byte by byte: the whole (verification), its tables and shards, and its sidecars."""
