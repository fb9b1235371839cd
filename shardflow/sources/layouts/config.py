"""Settings of the layout: how the inputs of a job are laid out in folders and tables."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from shardflow.configs import check_fields
from shardflow.errors import ConfigError

__all__ = ["LayoutConfig", "LayoutKind"]

LayoutKind: TypeAlias = Literal[
    "headers", "folder", "manifest", "mimic-cxr", "chexpert", "openi", "padchest", "ct-rate", "lidc", "rsna"
]
"""``headers``: DICOM headers say whose an image is. ``folder``: paths do, by a pattern. ``manifest``: a table
does. The others are collections as their owners hand them out; docs/layouts.md describes each."""

_GROUPS = frozenset({"patient", "study", "series", "number", "split"})
_PATHS = ("table", "split_table")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutConfig:
    """Whose an input is, and which report goes with it."""

    kind: LayoutKind = "headers"
    """How the inputs are laid out."""
    table: Path | None = None
    """CSV (``.csv``, ``.csv.gz``) or Parquet table of the images; which kinds have one: docs/layouts.md."""
    columns: dict[str, str] = field(default_factory=dict)
    """What the columns of ``table`` are called, by role, where a kind's own names do not fit."""
    report_columns: dict[str, str] = field(default_factory=dict)
    """The same for the table of ``inputs.reports``."""
    pattern: str = ""
    """Of kind ``folder``: a regular expression for the path below the input folder, with named groups
    ``patient``, ``study``, ``series``, ``number``, ``split``; a path must match it whole."""
    is_study_within_patient: bool = False
    """Whether studies are named within their patient (``study1``), so that only both names tell them apart.
    Of kinds ``folder`` and ``manifest``."""
    is_patient_study: bool = False
    """Whether a study that names no patient is a patient of its own; else it is quarantined. Set it only if
    no patient has several studies, or one may be trained on and tested on."""
    modality: str = ""
    """DICOM term of images without a header, such as ``CR`` or ``CT``, where neither table nor kind has
    one."""
    split_table: Path | None = None
    """Table of the official splits: a column ``split`` and one of patients."""
    split_columns: dict[str, str] = field(default_factory=dict)
    """What its columns are called: roles ``patient`` and ``split``."""
    split_names: dict[str, str] = field(default_factory=dict)
    """Split of this dataset for names in tables, paths and patterns, such as ``valid = "val"``."""
    volume_facts: Literal["header", "table"] = "header"
    """Where spacing, slope and intercept of NIfTI volumes come from; never from both."""
    missing_files: Literal["quarantine", "ignore"] = "quarantine"
    """What becomes of rows whose file is not there: inputs that are quarantined, or no inputs (a part of a
    collection was fetched)."""
    report_of_several_studies: Literal["quarantine", "copy"] = "quarantine"
    """What becomes of a report that names several studies: none of them has it, or each has a copy."""
    reports_of_one_study: Literal["quarantine", "append"] = "quarantine"
    """What becomes of several different reports of one study: quarantined with it, or the final one is taken
    with all addenda behind it, and preliminary ones are left out."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kind == "folder":
            self._check_pattern()
        elif self.pattern:
            raise ConfigError(f"pattern must be empty for kind {self.kind!r}, got one; remove it.")
        if self.kind == "manifest" and self.table is None:
            raise ConfigError("table must name the table of images for kind 'manifest', got none; name it.")

    def _check_pattern(self) -> None:
        try:
            groups = set(re.compile(self.pattern).groupindex)
        except re.error as error:
            raise ConfigError(
                f"pattern must be a regular expression, got: {error.msg}; correct it."
            ) from None
        if unknown := groups - _GROUPS:
            raise ConfigError(
                f"pattern must have groups out of {', '.join(sorted(_GROUPS))}, "
                f"got {', '.join(sorted(unknown))}; rename them."
            )
        if "study" not in groups:
            raise ConfigError("pattern must have a group (?P<study>...), got none; add it.")

    def content(self) -> dict[str, Any] | None:
        """Return what decides the dataset's bytes; None where headers say everything and nothing is set."""
        row = {name: value for name, value in asdict(self).items() if name not in _PATHS}
        row["has_split_table"] = self.split_table is not None
        return None if self == LayoutConfig() else row
