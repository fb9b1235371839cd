"""Packing: DICOM studies and reports in, a dataset of format 1 out; resumable, any number of processes.

`job` tells the data's way; `config` the settings. Knows the sources and the format, never torch or the
loader.
"""

from shardflow.packing.config import PackConfig
from shardflow.packing.job import pack
from shardflow.packing.progress import Progress, SilentProgress
from shardflow.packing.summary import PackSummary

__all__ = ["PackConfig", "PackSummary", "Progress", "SilentProgress", "pack"]
