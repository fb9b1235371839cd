"""Keys of S3 from the files that Amazon's tools share: ``~/.aws/credentials`` and ``~/.aws/config``.

The client reads the environment, web identities, containers and the machine's role by itself, but no files.
Nothing of what is read here is ever part of a message.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from shardflow.errors import StorageError

__all__ = ["profile_settings"]

# Set by those who gave credentials another way, which come before the files.
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


def profile_settings() -> dict[str, str]:
    """Return settings of the client from the profile in use: keys, and the region where none is set.

    The profile is ``AWS_PROFILE`` or ``default``. Empty where credentials come from elsewhere, or no file has
    the profile.

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
            "the profile that AWS_PROFILE names must hold aws_access_key_id and aws_secret_access_key, got "
            'one without; for roles and single sign-on: eval "$(aws configure export-credentials --format '
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
        # The parser quotes the line it stumbles over.
        raise StorageError(
            f"the file of {variable} must be a readable file of profiles, got {type(error).__name__}."
        ) from None
    return dict(parser[name]) if parser.has_section(name) else {}
