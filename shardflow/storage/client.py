"""The client of object stores: made when first used, in the process that uses it, from an address alone.

Credentials, endpoint and region come from the environment, as obstore reads it (``AWS_*``, ``GOOGLE_*``,
``AZURE_*``), from the files that Amazon's tools share, or from the machine's role; an address that carries
any is refused, because addresses are printed.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from shardflow.errors import ConfigError, StorageError
from shardflow.storage.aws_profile import profile_settings
from shardflow.storage.endpoints import check_endpoint, endpoint_of

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = [
    "READ_ONLY_SCHEMES",
    "REMOTE_SCHEMES",
    "check_process",
    "check_remote_url",
    "make_client",
    "require_client",
]

READ_ONLY_SCHEMES: Final = frozenset({"http", "https"})
REMOTE_SCHEMES: Final = frozenset({"s3", "gs", "az"}) | READ_ONLY_SCHEMES

# The one fact of the process that a fork must not lose: the client's threads do not cross it, and a call that
# waits for them never returns.
_owner_pid: list[int] = []


def check_remote_url(url: str) -> str:
    """Return an address without a slash at its end.

    Raises:
        StorageError: The scheme is unknown, no bucket or host is named, or the address carries a user, a
            password, a query or a fragment. The message does not repeat it.
    """
    parts = urlsplit(url)
    if parts.scheme not in REMOTE_SCHEMES or not parts.netloc:
        raise StorageError(
            "a remote address must be s3://, gs://, az:// or http(s):// with a bucket or host."
        )
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise StorageError(
            "a remote address must hold no user, password, signature or query, got one that does; give "
            "credentials in the environment."
        )
    return url.rstrip("/")


def make_client(
    url: str, *, timeout_s: float, stall_timeout_s: float, max_retries: int, retry_timeout_s: float
) -> ObjectStore:
    """Make a client for the objects below an address.

    Args:
        url: From `check_remote_url`.
        timeout_s: Of one request, its body with it.
        stall_timeout_s: Longest time without a byte of an answer.
        max_retries: How often the client itself tries again.
        retry_timeout_s: How long it does.

    Raises:
        StorageError: The environment's settings are refused, the address leads to a server that is not to be
            asked, or this process was forked from one that uses a client.
        ConfigError: The list of endpoints is none.
    """
    import obstore.exceptions
    import obstore.store

    check_process()
    check_endpoint(url)
    options: dict[str, Any] = {
        "timeout": timedelta(seconds=timeout_s),
        "read_timeout": timedelta(seconds=stall_timeout_s),
        "connect_timeout": timedelta(seconds=min(timeout_s, 10.0)),
    }
    scheme = urlsplit(url).scheme
    if endpoint_of(url).startswith("http://"):
        # Who writes http:// means it. A redirect from https:// to http:// is not followed.
        options["allow_http"] = True
    keywords: dict[str, Any] = {}
    if scheme == "s3":
        keywords = {"copy_if_not_exists": "multipart", **profile_settings()}
    factory: Any = obstore.store.from_url  # its overloads know the settings of one scheme each
    try:
        client: ObjectStore = factory(
            url,
            client_options=options,
            retry_config={"max_retries": max_retries, "retry_timeout": timedelta(seconds=retry_timeout_s)},
            **keywords,
        )
    except obstore.exceptions.BaseError as error:
        raise StorageError(
            f"a client for {scheme}:// must take the environment's settings, got {type(error).__name__}; "
            "correct AWS_*, GOOGLE_* or AZURE_*."
        ) from None
    return client


def require_client() -> None:
    """Say what to install where the client is not there.

    Raises:
        ConfigError: obstore is not installed.
    """
    try:
        import obstore  # noqa: F401 - asked whether it is there
    except ImportError:
        raise ConfigError(
            "a dataset in an object store needs the package obstore, got none; "
            "install it with: pip install 'shardflow[remote]'."
        ) from None


def check_process() -> None:
    """Refuse to go on in a fork of a process that used a client; note the process otherwise.

    Raises:
        StorageError: This is such a fork.
    """
    pid = os.getpid()
    if not _owner_pid:
        _owner_pid.append(pid)
    elif _owner_pid[0] != pid:
        raise StorageError(
            "a remote store must be used in a process of its own, got a fork of one that used it already; "
            'start workers with spawn or forkserver (DataLoader: multiprocessing_context="spawn").'
        )
