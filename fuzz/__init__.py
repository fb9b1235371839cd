"""Fuzzing: whatever the bytes are, a reader ends with a result or with an error of ours (`python -m fuzz`)."""
