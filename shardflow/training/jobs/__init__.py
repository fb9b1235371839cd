"""Jobs beside training that take the settings of a run.

Before it: how much memory it needs (``memory``, computed without a GPU or measured), how fast it can be
(``headroom``), and columns that it reads (``reference_columns``). After it: what its model writes
(``generating``).
"""
