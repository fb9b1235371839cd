"""What went wrong in an object store, in our words.

The texts of the client quote addresses, keys and bodies of the server: nothing of them is kept but the HTTP
status. What may pass becomes a `PassingFaultError`; everything else is an error at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from shardflow.errors import (
    AlreadyExistsError,
    NotFoundError,
    ObjectChangedError,
    ShortReadError,
    StorageError,
)
from shardflow.storage.retrying import PassingFaultError

__all__ = ["LengthRequiredError", "changed", "translated"]

_STATUS: Final = re.compile(r"status code: (\d{3})")
_PASSING: Final = {"408", "425", "429", "500", "502", "503", "504"}
_REFUSALS: Final = {"429", "503"}
# What the client says of an answer whose head does not fit the request: "Requested 0..10, got 5..15".
_OTHER_ANSWER: Final = re.compile(
    r"Requested \d+\.\.\d+, got|CONTENT_RANGE|Content-Range|MissingContentLength"
)
# An error page of something between may come once or twice; a server without ranges answers so for ever.
_FEW_ATTEMPTS: Final = 3
# The client builds no request for an endpoint of plain HTTP that the environment names for a cloud.
_PLAIN_HTTP: Final = "builder error"
# Asked for the role of the machine, as the last place where credentials may be found.
_METADATA_SERVERS: Final = ("169.254.169.254", "metadata.google.internal")
_NO_SUCH_RANGE: Final = "416"
_NOT_IMPLEMENTED: Final = "501"
_LENGTH_REQUIRED: Final = "411"
_READING: Final = "reading"


class LengthRequiredError(StorageError):
    """The server wants the length of a body that a request does not have (411): it cannot copy as asked."""


@contextmanager
def translated(action: str, path: str) -> Iterator[None]:
    """Translate what obstore raises.

    Args:
        action: What is done: ``"reading"``, ``"writing"``, ``"listing"``.
        path: The object, as the dataset names it.

    Raises:
        NotFoundError: There is no such object.
        AlreadyExistsError: A conditional write met an object.
        ObjectChangedError: A conditional read met another version.
        ShortReadError: The range begins behind the end of the object.
        PassingFaultError: It may pass.
        StorageError: Anything else.
    """
    from obstore import exceptions

    try:
        yield
    except FileNotFoundError as error:
        if isinstance(error, StorageError):
            raise
        raise NotFoundError(
            f"{path} must exist in the store, found nothing; is the address right, and the dataset whole?"
        ) from None
    except exceptions.AlreadyExistsError:
        raise AlreadyExistsError(
            f"{path} must be new, got an object that stands already; objects are written once."
        ) from None
    except exceptions.PreconditionError:
        raise changed(path) from None
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError):
        raise StorageError(
            f"{action} {path} must be permitted, got a refusal of the store; give credentials in the "
            "environment (AWS_*, GOOGLE_*, AZURE_*) that allow it."
        ) from None
    except exceptions.NotSupportedError:
        if action == _READING:
            raise _other_answer() from None
        raise _not_supported(action, path) from None
    except exceptions.BaseError as error:
        raise _of_text(str(error), action, path) from None


def changed(path: str) -> ObjectChangedError:
    """Make the error that an object is no longer the one that was read before."""
    return ObjectChangedError(
        f"{path} must stay as it was first read, got another version (ETag); objects are written once: put "
        "back the one that the manifest names (`shardflow verify` tells), or start again with a new version."
    )


def _of_text(text: str, action: str, path: str) -> StorageError:
    found = _STATUS.search(text)
    status = found[1] if found else ""
    if _PLAIN_HTTP in text:
        return StorageError(
            f"{action} {path} must go to an https:// endpoint, got one of plain HTTP, which is refused for "
            "gs:// and az://; correct the endpoint in GOOGLE_* or AZURE_*."
        )
    if any(server in text for server in _METADATA_SERVERS):
        return PassingFaultError(
            "no credentials (none in the environment or a profile, and no role of this machine; set AWS_*, "
            "GOOGLE_* or AZURE_*)",
            max_attempts=_FEW_ATTEMPTS,
        )
    if status == _NO_SUCH_RANGE:
        return ShortReadError(
            f"{path} must hold the range asked for, got the end of the object; verify the dataset."
        )
    if status == _LENGTH_REQUIRED:
        return LengthRequiredError(f"{action} {path} must be taken without a body, got HTTP status {status}.")
    if status == _NOT_IMPLEMENTED:
        return _not_supported(action, path)
    if status in _PASSING:
        return PassingFaultError(f"HTTP status {status}", is_refusal=status in _REFUSALS)
    if status:
        return StorageError(
            f"{action} {path} must succeed, got HTTP status {status}; check address, region and permissions."
        )
    if _OTHER_ANSWER.search(text):
        return _other_answer()
    if "timed out" in text or "TimedOut" in text:
        return PassingFaultError("a timeout")
    return PassingFaultError("a broken connection")


def _other_answer() -> PassingFaultError:
    return PassingFaultError(
        "another answer than the range asked for (an error page, a wrong Content-Range, or a server without "
        "ranges, which shardflow needs)",
        max_attempts=_FEW_ATTEMPTS,
    )


def _not_supported(action: str, path: str) -> StorageError:
    return StorageError(
        f"{action} {path} must be a thing the store can do, got its refusal; shardflow needs ranged reads "
        "(HTTP 206) and conditional writes (If-None-Match)."
    )
