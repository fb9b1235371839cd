"""Dataset versions: append, retry, remove, compact."""
