"""Layouts whose images are listed in a table, one row an image."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final

from shardflow.errors import ConfigError
from shardflow.sources.dicom import DiscoveredFile
from shardflow.sources.layouts.base import LayoutInputs, PlacedLayout, form_of_path
from shardflow.sources.layouts.placement import ImageForm, Placement
from shardflow.sources.layouts.tables import read_table
from shardflow.sources.reasons import Reason
from shardflow.sources.reports import BrokenReport, ReportRecord, ReportRole, make_record

__all__ = ["TableLayout", "read_report_rows"]

Values = Mapping[str, str]

_TABLE: Final = "layout.table"
_ROLES: Final[dict[str, ReportRole]] = {
    "": "final",
    "add": "addendum",
    "addendum": "addendum",
    "amendment": "addendum",
    "corrected": "final",
    "final": "final",
    "prelim": "preliminary",
    "preliminary": "preliminary",
}


class TableLayout(PlacedLayout):
    """Finds the row of a file by a key that both have; subclasses say which, and what the row means.

    A table keeps its rows in memory: some hundred bytes an image.
    """

    columns: ClassVar[Mapping[str, str]] = {}
    """Role to the name that the collection gives the column."""
    required: ClassVar[tuple[str, ...]] = ()
    """Roles without which the table is of no use."""

    def __init__(self, inputs: LayoutInputs, splits: Sequence[str]) -> None:
        super().__init__(inputs, splits)
        _check_roles("layout.columns", self.settings.columns, self.columns)
        self._roles = tuple(sorted(self.columns))
        self._rows: dict[str, tuple[str, ...] | None] = {}
        """Key to the values of a row; None where rows contradict each other."""
        self._there: set[str] = set()
        """Keys of the files that were found."""
        if self.settings.table is not None:
            self._read_rows(self.settings.table)

    @property
    def has_table(self) -> bool:
        """Whether there is a table; some layouts do without one."""
        return self.settings.table is not None

    def key_of_row(self, values: Values) -> str:
        """Key of a row; ``""`` for a row that names no image."""
        raise NotImplementedError

    def key_of_file(self, path: str) -> str:
        """Key of a file, by its path below the input folder."""
        raise NotImplementedError

    def place_row(self, values: Values, path: str, form: ImageForm) -> Placement | Reason:
        """Say what a row means for its file; all roles are empty where there is no table."""
        raise NotImplementedError

    def rows(self) -> Iterator[tuple[str, Values]]:
        """Yield all rows that are of one mind, by key."""
        for key, row in self._rows.items():
            if row is not None:
                yield key, dict(zip(self._roles, row, strict=True))

    def discover(self) -> list[DiscoveredFile]:
        """List the files, and the rows whose file is not there."""
        found = super().discover()
        if not self.has_table or self.settings.missing_files == "ignore":
            return found
        there = self._there
        for file in found:
            path = file.path(self._roots)
            if form_of_path(path) is not None:
                there.add(self.key_of_file(self.relative_path(path)))
        return found + [
            DiscoveredFile(root_index=0, relative_path=key, num_bytes=0, problem=Reason.MISSING_FILE)
            for key in sorted(self._rows.keys() - there)
        ]

    def place(self, file: DiscoveredFile) -> Placement | Reason | None:
        """Say whose image a file is; a row without a file has its place too, and its study is not whole."""
        if file.problem is Reason.MISSING_FILE:
            key = self.relative_path(file.path(self._roots))
            if key in self._there:
                # The row was without a file once, and has one now, maybe with an ending.
                return Reason.DUPLICATE_INSTANCE
            return self._place_key(key, key, form_of_path(key) or "dicom")
        return super().place(file)

    def place_image(self, path: str, form: ImageForm) -> Placement | Reason:
        """Place a file by its row."""
        if not self.has_table:
            return self.place_row(dict.fromkeys(self._roles, ""), path, form)
        return self._place_key(self.key_of_file(path), path, form)

    def _place_key(self, key: str, path: str, form: ImageForm) -> Placement | Reason:
        if key not in self._rows:
            return Reason.NOT_IN_LAYOUT
        row = self._rows[key]
        if row is None:
            return Reason.AMBIGUOUS_LINK
        return self.place_row(dict(zip(self._roles, row, strict=True)), path, form)

    def _read_rows(self, table: Path) -> None:
        columns = {**self.columns, **self.settings.columns}
        # What the settings name must be there: a column with a wrong name would be empty in silence.
        required = {*self.required, *self.settings.columns}
        known: dict[str, str] = {}
        for row in read_table(table, _TABLE, columns, sorted(required)):
            if row.values is None:
                raise ConfigError(
                    f"{_TABLE} must have as many values as columns in every row, got another number (line "
                    f"{row.place}); repair the table."
                )
            key = self.key_of_row(row.values)
            if not key:
                raise ConfigError(
                    f"{_TABLE} must name an image in every row, got a row that names none "
                    f"(line {row.place}); correct it."
                )
            # Few values are different: sexes, views, splits, patients of several images.
            values = tuple(known.setdefault(row.values[role], row.values[role]) for role in self._roles)
            if self._rows.setdefault(key, values) != values:
                self._rows[key] = None


def read_report_rows(
    path: Path,
    settings: Mapping[str, str],
    columns: Mapping[str, str],
    required: Sequence[str],
    studies_of: Callable[[Values], Sequence[str]],
    text_of: Callable[[Values], str],
    *,
    copies: bool = False,
) -> Iterator[ReportRecord | BrokenReport]:
    """Read reports from a table.

    Args:
        path: The table.
        settings: Names of columns by the settings.
        columns: Role to the usual name of the column; role ``role`` tells preliminary reports and addenda.
        required: Roles that must have a column.
        studies_of: The studies that a row names.
        text_of: Its text.
        copies: Whether a report of several studies is copied to each; else it is ambiguous.
    """
    _check_roles("layout.report_columns", settings, columns)
    all_columns, needed = {**columns, **settings}, sorted({*required, *settings})
    place = 0
    for row in read_table(path, "inputs.reports", all_columns, needed):
        place += 1
        if row.values is None:
            yield BrokenReport(
                place=place, reason=Reason.REPORT_UNREADABLE, detail="another number of columns"
            )
            continue
        studies = studies_of(row.values)
        role = _ROLES.get(row.values.get("role", "").casefold())
        for number, study in enumerate(studies or ("",)):
            place += number > 0
            if role is None:
                yield BrokenReport(
                    place=place,
                    reason=Reason.REPORT_UNREADABLE,
                    detail="an unknown status",
                    study_instance_uid=study,
                )
            elif len(studies) > 1 and not copies:
                yield BrokenReport(
                    place=place, reason=Reason.AMBIGUOUS_LINK, detail="", study_instance_uid=study
                )
            else:
                yield make_record(place, study, text_of(row.values), role)


def _check_roles(what: str, named: Mapping[str, str], known: Mapping[str, str]) -> None:
    if unknown := sorted(named.keys() - known.keys()):
        roles = ", ".join(sorted(known)) or "none"
        raise ConfigError(f"{what} must name roles out of {roles}, got {unknown[0]!r}; correct it.")
