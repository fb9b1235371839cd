"""Fuzzing (`python -m fuzz`): whatever the bytes are, a reader ends with a result or an error of ours."""
