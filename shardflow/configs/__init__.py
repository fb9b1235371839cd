"""Settings: a strict TOML file becomes a frozen dataclass, or an error that names the mistake.

Owns reading, overriding, checking and writing of settings for every job. Knows no particular setting: each
package has its own dataclasses and passes them in. Invariant: an unknown key is never ignored, and nothing is
read from the environment.

Field types: ``bool int float str Path``, ``Literal[...]``, ``tuple[T, ...]``, ``dict[str, T]``, ``T | None``,
nested dataclasses (TOML tables), and ``Annotated`` with :data:`BYTE_SIZE` (``"512MiB"`` or an integer),
:data:`PLACE` (a path or an address), :class:`Bounds`, or, for a table that may be written in two places,
:class:`Inside` or :data:`SPREAD`. Relative paths in the file are taken from the file's
folder, relative paths of ``--set`` from the current folder; ``~`` is the home folder.
"""

from shardflow.configs.binding import load_config
from shardflow.configs.dumping import dump_config
from shardflow.configs.fields import (
    BYTE_SIZE,
    PLACE,
    SPREAD,
    Bounds,
    ByteSize,
    Inside,
    Place,
    check_fields,
    parse_byte_size,
)

__all__ = [
    "BYTE_SIZE",
    "PLACE",
    "SPREAD",
    "Bounds",
    "ByteSize",
    "Inside",
    "Place",
    "check_fields",
    "dump_config",
    "load_config",
    "parse_byte_size",
]
