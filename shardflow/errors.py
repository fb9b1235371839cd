"""Error classes of shardflow.

::

    ShardflowError
    +-- ConfigError              a setting is wrong (also a ValueError); exit code 2
    +-- StorageError             a byte store could not do what was asked
    |   +-- NotFoundError        (also a FileNotFoundError)
    |   +-- AlreadyExistsError   (also a FileExistsError)
    |   +-- ShortReadError       fewer bytes came than the index promises
    |   +-- ObjectChangedError   an object is no longer the one that was read first
    |   +-- NoListingError       the store cannot list what it holds (plain HTTP)
    +-- FormatError              the bytes of a dataset are not what format 1 says
    |   +-- ChecksumError        a digest or crc32c differs
    |   +-- ManifestError        no manifest, or one that cannot be trusted
    +-- SourceError              an input cannot be packed; carries a reason code
    +-- PlanError                no epoch can be planned from these numbers
    +-- StateError               a loader state or checkpoint belongs to another run
    +-- SampleError              one sample cannot be delivered at run time
    +-- WaitTimeoutError         a wait passed its deadline (also a TimeoutError)
    +-- LoaderProcessError       a loader process died, or user code failed in it
    +-- RanksDisagreeError       ranks would not run the same steps
    +-- RankLostError            another rank ended or hangs; the message names it
    +-- NoProgressError          a run failed at the same place too often to be restarted
    +-- CheckpointError          a checkpoint is missing or damaged
    +-- TrainingError            a step cannot be taken: a gradient is missing or not finite

A message states what was expected, what was found, where, and what to do. It names shards, members, sample
keys, ranks and steps. It never contains an identifier, a date, an input path or report text: whoever
catches an error of a third-party parser keeps its class name and drops its text.
"""

from __future__ import annotations


class ShardflowError(Exception):
    """Base of all errors raised on purpose; one message, one string."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ConfigError(ShardflowError, ValueError):
    """A setting is unknown, missing, of the wrong type or out of range."""


class StorageError(ShardflowError):
    """A byte store could not do what was asked."""


class NotFoundError(StorageError, FileNotFoundError):
    """The named object is not in the store."""


class AlreadyExistsError(StorageError, FileExistsError):
    """The object stands already; objects are written once."""


class ShortReadError(StorageError):
    """The store gave fewer bytes than the range asked for."""


class ObjectChangedError(StorageError):
    """An object is no longer the one that was read first, though objects are written once."""


class NoListingError(StorageError):
    """The store cannot list what it holds."""


class FormatError(ShardflowError):
    """The bytes of a dataset are not what format 1 says they are."""


class ChecksumError(FormatError):
    """A digest or a crc32c differs from the recorded one."""


class ManifestError(FormatError):
    """No manifest, or one that cannot be read or trusted."""


class SourceError(ShardflowError):
    """An input cannot be packed.

    Attributes:
        reason: The stable code that goes into the ledger, such as ``"PIXEL_DATA_TRUNCATED"``.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type[SourceError], tuple[str, str]]:
        """Cross a process boundary with both fields."""
        return type(self), (self.reason, self.message)


class PlanError(ShardflowError):
    """No epoch can be planned from these numbers."""


class StateError(ShardflowError):
    """A loader state or a checkpoint belongs to another run, dataset or batch spec."""


class SampleError(ShardflowError):
    """One sample cannot be delivered at run time, and the bound on such samples is reached."""


class WaitTimeoutError(ShardflowError, TimeoutError):
    """A wait passed its deadline; the message names what was waited for."""


class LoaderProcessError(ShardflowError):
    """A process that loads for the trainer died, or an error came out of it that has no class here."""


class RanksDisagreeError(ShardflowError):
    """The ranks would not run the same steps; the message names the ranks and the values."""


class RankLostError(ShardflowError):
    """Another rank ended or hangs; the message names rank, host and phase.

    Attributes:
        is_refusal: That rank found something that a new start does not change, such as a wrong setting.
    """

    def __init__(self, message: str, *, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.is_refusal = is_refusal


class NoProgressError(ShardflowError):
    """Several starts in a row ended before a next checkpoint; a person must look (exit code 2)."""


class CheckpointError(ShardflowError):
    """A checkpoint is missing, damaged or of another kind of model."""


class TrainingError(ShardflowError):
    """A training step cannot be taken: a gradient is missing or not finite."""
