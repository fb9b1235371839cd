"""Models: the reference model, models of transformers, adapters."""
