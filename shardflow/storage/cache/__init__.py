"""Read cache: process memory, a folder shared by the processes of a node, and the store behind them.

Decides what is kept, where, and what is evicted first, using the epoch plan's next uses. Independent of
datasets: objects are given by digests, pieces and checksums, future reads by units and steps. Readers get
the bytes of the origin whatever happens to the cache.
"""
