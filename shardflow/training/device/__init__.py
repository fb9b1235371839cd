"""Device side of a micro-batch: its transfer, and the transforms of its images.

``transfer`` copies each micro-batch through pinned memory of bounded size, in one copy on a stream of its
own; ``images`` makes one tensor of samples of many sizes, and windows, normalizes, resizes and rotates them
with torch operators that compile into one graph. ``shardflow.training.inputs`` combines them.
"""
