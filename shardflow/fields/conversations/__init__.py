"""Conversations with images, rendered for a model by the model's own processor."""
