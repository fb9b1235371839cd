"""Names of a package that are imported when they are first used (PEP 562).

The front of a package would otherwise load all of its modules when one of them is imported, which is much of
what a command or a packing process costs before it does anything. A package lists its names twice: as imports
under ``TYPE_CHECKING``, which type checkers read, and as sources. A test compares the two.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def lazy_names(
    package: str, sources: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: The package's ``__name__``.
        sources: Public names, and where each is defined: ``module:name``, or ``module`` alone for a module.
            One that begins with a dot lies in the package.

    ``__getattr__`` raises AttributeError for an unknown name only: an AttributeError of the import itself
    becomes an ImportError.
    """

    def get(name: str) -> object:
        """Import a name from the module that defines it."""
        if name not in sources:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint(name)}", name=name)
        module, _, defined = sources[name].partition(":")
        try:
            value: object = importlib.import_module(module, package)
            if defined:
                value = getattr(value, defined)
        except AttributeError as error:
            # `hasattr` and `from package import name` would hide it, and say that there is no such name.
            raise ImportError(f"cannot import {name!r} from {package!r}: {error}", name=package) from error
        setattr(sys.modules[package], name, value)  # Python asks here for missing names only
        return value

    def hint(name: str) -> str:
        # Python and its tools ask for names such as `__path__` and `__wrapped__`, of every module.
        if name.startswith("_") or not name.isidentifier():
            return ""
        from importlib.util import find_spec

        submodule = f"{package}.{name}"
        if submodule in sys.modules:  # `from package import submodule` asks here first
            return ""
        if find_spec(submodule) is not None:
            return f"; write `import {submodule}` first"
        import difflib

        near = difflib.get_close_matches(name, sources, n=1)
        return f"; did you mean {near[0]!r}?" if near else ""

    def list_names() -> list[str]:
        """List the public names, whether they are imported yet or not."""
        return sorted({*vars(sys.modules[package]), *sources})

    return get, list_names
