"""Error classes of shardflow.

::

    ShardflowError
    +-- ConfigError              a setting is invalid (also a ValueError); exit code 2
    +-- StorageError             an operation of a byte store failed
    |   +-- NotFoundError        (also a FileNotFoundError)
    |   +-- AlreadyExistsError   (also a FileExistsError)
    |   +-- ShortReadError       an object ends before the requested range
    |   +-- ObjectChangedError   an object changed since it was first read
    |   +-- NoListingError       the store cannot list its objects (plain HTTP)
    |   +-- ProofError           a store holds other bytes than those that were signed; exit code 2
    +-- FormatError              the bytes of a dataset violate its format
    |   +-- ChecksumError        a digest or crc32c differs
    |   +-- ManifestError        the manifest is missing, unreadable or not trustworthy
    +-- SourceError              an input cannot be packed; carries a reason code
    +-- PlanError                no epoch can be planned from these numbers
    +-- StateError               a loader state or checkpoint belongs to another run
    +-- SampleError              one sample cannot be delivered at run time
    +-- WaitTimeoutError         a wait passed its deadline (also a TimeoutError)
    +-- LoaderProcessError       a loader process died, or user code failed in it
    +-- RanksDisagreeError       ranks would not run the same steps
    +-- RankLostError            another rank ended or hangs; the message names it
    +-- NoProgressError          a run failed at the same step too often to be restarted
    +-- CheckpointError          a checkpoint is missing or damaged
    +-- TrainingError            a step cannot be taken: a gradient is missing or not finite

A message states what was expected, what was found, where, and what to do. It names shards, members, sample
keys, ranks and steps. It never contains an identifier, a date, an input path or report text: of an error of
a third-party parser only the class name is kept.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


class ShardflowError(Exception):
    """Base of all errors raised on purpose; one message, one string."""

    exit_code: int = 1
    """What a rank of a training job that it ends leaves with; 2 and 3 if a restart does not help."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


def os_reason(error: Exception) -> str:
    """Return what the operating system says, such as ``"Read-only file system"``, without a path.

    Of other errors it is the class.
    """
    code = error.errno if isinstance(error, OSError) else None
    return os.strerror(code) if code else type(error).__name__


class ConfigError(ShardflowError, ValueError):
    """A setting is unknown, missing, of the wrong type or out of range.

    Attributes:
        path: The input path at fault, for the operator's own terminal; ``""`` if there is none. It is no part
            of the message, because messages are logged.
    """

    exit_code = 2

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class StorageError(ShardflowError):
    """An operation of a byte store failed."""


class NotFoundError(StorageError, FileNotFoundError):
    """The object does not exist in the store."""


class AlreadyExistsError(StorageError, FileExistsError):
    """The object exists already; objects are written once."""


class ShortReadError(StorageError):
    """The object ends before the requested range."""


class ObjectChangedError(StorageError):
    """An object changed since it was first read, although objects are written once."""


class NoListingError(StorageError):
    """The store cannot list its objects."""


class ProofError(StorageError):
    """A store holds other bytes than those that were signed (exit code 2)."""

    exit_code = 2


class FormatError(ShardflowError):
    """The bytes of a dataset violate its format."""


class ChecksumError(FormatError):
    """A digest or a crc32c differs from the recorded one."""


class ManifestError(FormatError):
    """The manifest is missing, unreadable or not trustworthy."""


class SignatureError(ManifestError):
    """What is opened must be signed by a trusted key, and is not (exit code 2)."""

    exit_code = 2


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

    exit_code = 2


class StateError(ShardflowError):
    """A loader state or a checkpoint belongs to another run, dataset or batch spec."""

    exit_code = 2


class SampleError(ShardflowError):
    """A sample cannot be delivered at run time, and the limit on such samples is reached (exit code 3)."""

    exit_code = 3


class WaitTimeoutError(ShardflowError, TimeoutError):
    """A wait passed its deadline; the message names the awaited event."""


class LoaderProcessError(ShardflowError):
    """A loader process died, or raised an error without a class of its own here."""


class RanksDisagreeError(ShardflowError):
    """The ranks would not run the same steps; the message names the ranks and the values."""


class RankLostError(ShardflowError):
    """Another rank ended or hangs; the message names rank, host and phase.

    Attributes:
        exit_code: That of the rank whose end it was.
    """

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class NoProgressError(ShardflowError):
    """Several starts in a row failed before the next checkpoint (exit code 2)."""

    exit_code = 2


class CheckpointError(ShardflowError):
    """A checkpoint is missing, damaged or of another kind of model."""


class TrainingError(ShardflowError):
    """A training step cannot be taken: a gradient is missing or not finite."""


@contextmanager
def naming_os_errors(action: str) -> Iterator[None]:
    """Turn errors of the operating system into `StorageError` without a path, which may name a person."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"{action} must succeed, got: {os_reason(error)}; make room or repair it, and run the job again."
        ) from None
