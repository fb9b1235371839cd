"""Makes the engine that the settings ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardflow.errors import ConfigError
from shardflow.packing.engine import WorkerSetup
from shardflow.packing.handlers import make_setup
from shardflow.packing.limits import ChildLimits
from shardflow.packing.pool import ChildPool

if TYPE_CHECKING:
    from shardflow.packing.config import PackConfig
    from shardflow.packing.engine import Engine
    from shardflow.packing.workplace import Workplace

__all__ = ["make_engine"]

# A study's own files are bounded by what it decodes to, a shard by its target; both with room for overhead.
_FILE_HEADROOM: Final = 2


def make_engine(config: PackConfig, place: Workplace, handlers: str) -> Engine:
    """Make the engine of a job.

    Raises:
        ConfigError: Ray is asked for and not installed.
        ShardflowError: Ray cannot be started or reached.
    """
    execution = config.execution
    limits = ChildLimits(
        memory_bytes=execution.memory_bytes,
        task_s=execution.task_timeout_s,
        file_bytes=_FILE_HEADROOM * (config.limits.max_study_bytes + 2 * config.shards.target_bytes),
    )
    worker = WorkerSetup(
        limits=limits, handlers=handlers, setup=make_setup(config, place), log_path=place.process_log
    )
    if execution.engine == "local":
        return ChildPool(execution.resolved_num_processes, worker)
    try:
        from shardflow.packing.ray_engine import RayEngine
    except ImportError:
        raise ConfigError(
            'execution.engine must be "local" without Ray, got "ray"; install shardflow[ray].'
        ) from None
    num_processes = execution.num_processes if execution.ray_address else execution.resolved_num_processes
    return RayEngine(num_processes, worker, address=execution.ray_address)
