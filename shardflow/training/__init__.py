"""Training: the ranks, the model, the step, and what a run leaves behind.

Owns everything that needs torch, apart from one adapter in ``shardflow.loading``. Path of a step: ``inputs``
(a batch becomes tensors on the device), ``models`` (slices and text become logits), ``sequences`` (the loss),
``step`` (micro-batches become one gradient), ``loop`` (steps become epochs), ``checkpoint`` and ``ledger``
(what survives a kill). The job is ``shardflow.training.run.train``, its settings are
``shardflow.training.config.TrainConfig``; nothing is imported here, so that run files are read without torch.
"""
