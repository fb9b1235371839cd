"""Which servers may be asked.

A dataset may name other places than its own (foreign shards stay where they are), and whoever wrote it need
not be whoever reads it. ``SHARDFLOW_ENDPOINTS`` is the list of what may be asked; where it is not set,
everything may be but the addresses at which machines hand out their own credentials.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import Final
from urllib.parse import urlsplit

from shardflow.errors import ConfigError, StorageError

__all__ = ["ENDPOINTS_VARIABLE", "check_endpoint", "endpoint_of"]

ENDPOINTS_VARIABLE: Final = "SHARDFLOW_ENDPOINTS"
"""Environment variable: endpoints separated by commas, such as ``s3://,https://pacs.local:8443``."""

_S3_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_CLOUD_SCHEMES: Final = frozenset({"s3", "gs", "az"})
_METADATA_NAMES: Final = frozenset({"metadata", "metadata.google.internal", "instance-data"})


def endpoint_of(url: str) -> str:
    """Return the server behind an address: ``https://host:port``, or ``s3://`` for a cloud's own.

    An S3 address leads to the endpoint of the environment where one is set.

    Example:
        >>> endpoint_of("https://Example.org/sets/ct")
        'https://example.org:443'
    """
    scheme = urlsplit(url).scheme
    if scheme == "s3":
        url = next((os.environ[name] for name in _S3_ENDPOINTS if os.environ.get(name)), url)
    return _normal(url)


def check_endpoint(url: str) -> None:
    """Refuse an address whose server is not to be asked.

    Raises:
        StorageError: The server is not in the list, or hands out credentials of the machine. The message does
            not repeat the address.
        ConfigError: The list is no list of endpoints.
    """
    endpoint = endpoint_of(url)
    listed = os.environ.get(ENDPOINTS_VARIABLE, "")
    if listed:
        if endpoint not in _allowed(listed):
            raise StorageError(
                f"an address must lead to one of the endpoints in {ENDPOINTS_VARIABLE}, got another; add it "
                "to the list if it is to be asked."
            )
        return
    host = urlsplit(endpoint).hostname or ""
    if host.rstrip(".") in _METADATA_NAMES or any(address.is_link_local for address in _addresses(host)):
        raise StorageError(
            "an address must not lead to a link-local or metadata server, got one; if it is meant, list it "
            f"in {ENDPOINTS_VARIABLE}."
        )


def _allowed(listed: str) -> set[str]:
    allowed = set()
    for entry in listed.split(","):
        parts = urlsplit(entry.strip())
        is_cloud = parts.scheme in _CLOUD_SCHEMES and not parts.netloc
        is_server = parts.scheme in _DEFAULT_PORTS and parts.hostname and "@" not in parts.netloc
        if not (is_cloud or is_server) or parts.path.strip("/") or parts.query:
            raise ConfigError(
                f"{ENDPOINTS_VARIABLE} must list endpoints such as s3:// or https://host:8443 between "
                "commas, got an entry that is none."
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
        raise StorageError("a port must be a number up to 65535, got another (endpoint).") from None
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _addresses(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return the address that a host is written as; a name is not looked up, it may answer anew later."""
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
