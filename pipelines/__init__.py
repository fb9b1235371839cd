"""Entry points of a checkout: the packing and training jobs, the demo, the recipes."""
