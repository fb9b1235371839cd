"""The device's side of a micro-batch: how it gets there, and what is done to its images there.

The way of the data, a module each::

    ring         pinned memory of bounded bytes, a region a micro-batch
    transfer     one copy a micro-batch, on a stream of its own; on CPUs none
    ragged       samples of many sizes become one tensor
    images       window, normalise, resize, turn: torch operators, one graph
    augmentation which turns and intensities a sample gets: keyed numbers, what its modality allows

``shardflow.training.inputs`` puts them together.
"""
