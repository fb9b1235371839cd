"""Checkpoints: folders of safetensors and JSON."""
