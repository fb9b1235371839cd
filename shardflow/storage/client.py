"""Object store client: created on first use, in the process that uses it, from a URL alone.

Credentials, endpoint and region come from the environment as obstore reads it (``AWS_*``, ``GOOGLE_*``,
``AZURE_*``), from ``~/.aws/credentials`` and ``~/.aws/config``, which obstore does not read, or from the
machine's role. A URL with credentials is refused, because URLs are printed; no message contains a value read
here.

A dataset may name other servers than its own (foreign shards stay in place), and its author need not be its
reader. ``SHARDFLOW_ENDPOINTS`` is the allowlist; without it every server is allowed except the metadata
addresses that hand out a machine's credentials.
"""

from __future__ import annotations

import configparser
import ipaddress
import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from shardflow.errors import ConfigError, StorageError, os_reason

if TYPE_CHECKING:
    from obstore.store import ObjectStore

# Other sources of credentials, which take precedence over the files.
_OTHER_SOURCES: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
_KEYS: Final = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}
ENDPOINTS_VARIABLE: Final = "SHARDFLOW_ENDPOINTS"
"""Environment variable: endpoints separated by commas, such as ``s3://,https://pacs.local:8443``."""
_S3_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_CLOUD_SCHEMES: Final = frozenset({"s3", "gs", "az"})
_METADATA_NAMES: Final = frozenset({"metadata", "metadata.google.internal", "instance-data"})
READ_ONLY_SCHEMES: Final = frozenset(_DEFAULT_PORTS)
REMOTE_SCHEMES: Final = _CLOUD_SCHEMES | READ_ONLY_SCHEMES
# Survives a fork, unlike the client's threads: a call that waits for those in the child would never return.
_owner_pid: list[int] = []


def profile_settings() -> dict[str, str]:
    """Return client settings from the active profile: keys, and the region if none is set.

    The profile is ``AWS_PROFILE`` or ``default``. The result is empty if credentials come from elsewhere or
    no file has the profile.

    Raises:
        StorageError: A file cannot be read, or ``AWS_PROFILE`` names a profile that has no keys of its own.
    """
    if any(os.environ.get(name) for name in _OTHER_SOURCES):
        return {}
    named = os.environ.get("AWS_PROFILE", "")
    profile = named or "default"
    credentials = _section("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", profile)
    config = _section(
        "AWS_CONFIG_FILE", "~/.aws/config", profile if profile == "default" else f"profile {profile}"
    )
    merged = {**config, **credentials}
    settings = {ours: merged[theirs] for theirs, ours in _KEYS.items() if merged.get(theirs)}
    if "access_key_id" not in settings or "secret_access_key" not in settings:
        if not named:
            return {}
        raise StorageError(
            "the profile that AWS_PROFILE names has no aws_access_key_id and aws_secret_access_key; "
            'for roles and single sign-on: eval "$(aws configure export-credentials --format '
            'env)".'
        )
    if merged.get("region") and not (os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")):
        settings["region"] = merged["region"]
    return settings


def _section(variable: str, usual: str, name: str) -> Mapping[str, str]:
    path = Path(os.environ.get(variable) or usual).expanduser()
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        with path.open(encoding="utf-8") as file:
            parser.read_file(file)
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        # The parser's text quotes the line that failed.
        raise StorageError(
            f"the file of {variable} is not a readable file of profiles: {os_reason(error)}."
        ) from None
    return dict(parser[name]) if parser.has_section(name) else {}


def endpoint_of(url: str) -> str:
    """Return the server of a URL: ``https://host:port``, or ``s3://`` for a cloud's own.

    An S3 URL uses the endpoint of the environment if one is set.

    Example:
        >>> endpoint_of("https://Example.org/sets/ct")
        'https://example.org:443'
    """
    scheme = urlsplit(url).scheme
    if scheme == "s3":
        url = next((os.environ[name] for name in _S3_ENDPOINTS if os.environ.get(name)), url)
    return _normal(url)


def check_endpoint(url: str) -> None:
    """Check that the server of a URL may be contacted.

    Raises:
        StorageError: The server is not on the allowlist, or is a metadata address. The message does not
            repeat the URL.
        ConfigError: The allowlist is malformed.
    """
    endpoint = endpoint_of(url)
    listed = os.environ.get(ENDPOINTS_VARIABLE, "")
    if listed:
        if endpoint not in _allowed(listed):
            raise StorageError(
                f"the server of a URL is not one of the endpoints in {ENDPOINTS_VARIABLE}; add it there if "
                "requests to it are intended."
            )
        return
    host = urlsplit(endpoint).hostname or ""
    if host.rstrip(".") in _METADATA_NAMES or any(address.is_link_local for address in _addresses(host)):
        raise StorageError(
            "the server of a URL is a link-local or metadata address; if requests to it are intended, list "
            f"it in {ENDPOINTS_VARIABLE}."
        )


def _allowed(listed: str) -> set[str]:
    allowed = set()
    for entry in listed.split(","):
        parts = urlsplit(entry.strip())
        is_cloud = parts.scheme in _CLOUD_SCHEMES and not parts.netloc
        is_server = parts.scheme in _DEFAULT_PORTS and parts.hostname and "@" not in parts.netloc
        if not (is_cloud or is_server) or parts.path.strip("/") or parts.query:
            raise ConfigError(
                f"{ENDPOINTS_VARIABLE} must list endpoints such as s3:// or https://host:8443, separated by "
                "commas, but one entry is no endpoint."
            )
        allowed.add(_normal(entry.strip()))
    return allowed


def _normal(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme in _CLOUD_SCHEMES:
        return f"{parts.scheme}://"
    host = parts.hostname or ""
    try:
        port = parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)
    except ValueError:
        raise StorageError("the port of an endpoint must be a number up to 65535.") from None
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _addresses(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return the address that a host is written as; names are not resolved, since the answer may change."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        try:
            # 2852039166, 0xa9fea9fe and 0251.254.169.254 are addresses to a resolver.
            return [ipaddress.IPv4Address(socket.inet_aton(host))]
        except OSError:
            return []
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return [mapped or address]


def check_remote_url(url: str) -> str:
    """Check a URL, and return it without a trailing slash.

    Raises:
        StorageError: The scheme is unknown, no bucket or host is named, or the URL contains a user, a
            password, a query or a fragment. The message does not repeat it.
    """
    parts = urlsplit(url)
    if parts.scheme not in REMOTE_SCHEMES or not parts.netloc:
        raise StorageError(
            "a remote URL must begin with s3://, gs://, az:// or http(s):// and name a bucket or host."
        )
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise StorageError(
            "a remote URL must not contain a user, password, signature or query; give credentials in the "
            "environment."
        )
    return url.rstrip("/")


def make_client(
    url: str, *, timeout_s: float, stall_timeout_s: float, max_retries: int, retry_timeout_s: float
) -> ObjectStore:
    """Make a client for the objects below a URL.

    Args:
        url: From `check_remote_url`.
        timeout_s: Of one request, including its body.
        stall_timeout_s: Longest time without a byte of the response.
        max_retries: Retries by the client itself.
        retry_timeout_s: Time limit of these retries.

    Raises:
        StorageError: The environment's settings are refused, the server is not allowed, or this process was
            forked from one that uses a client.
        ConfigError: The allowlist of endpoints is malformed.
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
        # http:// must be explicit: a redirect from https:// to http:// is not followed.
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
            f"the environment's settings for {scheme}:// are invalid ({type(error).__name__}); "
            "correct AWS_*, GOOGLE_* or AZURE_*."
        ) from None
    return client


def require_client() -> None:
    """Check that obstore is installed.

    Raises:
        ConfigError: obstore is not installed.
    """
    try:
        import obstore  # noqa: F401 - checks that it is installed
    except ImportError:
        raise ConfigError(
            "a dataset in an object store needs the package obstore, which is not installed; "
            "install it with: pip install 'shardflow[remote]'."
        ) from None


def check_process() -> None:
    """Refuse to run in a fork of a process that used a client; record the process otherwise.

    Raises:
        StorageError: This is such a fork.
    """
    pid = os.getpid()
    if not _owner_pid:
        _owner_pid.append(pid)
    elif _owner_pid[0] != pid:
        raise StorageError(
            "a remote store cannot be used in a fork of a process that used one before; "
            'start workers with spawn or forkserver (DataLoader: multiprocessing_context="spawn").'
        )
