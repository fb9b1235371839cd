"""``report.json`` and ``alignment.json``: what the stored report says, and which slices show it.

The lexicon and its automaton are made for the first report that a process packs, so that a job without
reports loads none of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardflow.errors import ConfigError
from shardflow.packing.content_config import ReportsConfig, digest_of

if TYPE_CHECKING:
    from shardflow.alignment import AlignmentRules
    from shardflow.reports import ReportReader

__all__ = ["REPORT_JSON_VERSION", "ReportParser", "parser_setup", "reading_basis"]

REPORT_JSON_VERSION: Final = 1


def parser_setup(config: ReportsConfig, alignment: AlignmentRules) -> dict[str, Any] | None:
    """Return what a packing process makes its `ReportParser` of, as JSON; None where it is to make none."""
    if not config.extract:
        return None
    return {
        "alignment": asdict(alignment) if config.align else None,
        "anatomy": [[str(path.absolute()), digest_of(path)] for path in config.anatomy],
        "extractors": sorted(config.extractors),
        "findings": [[str(path.absolute()), digest_of(path)] for path in config.findings],
    }


def reading_basis(config: ReportsConfig, alignment: AlignmentRules) -> list[Any]:
    """Return what both fields depend on beside the report and the study.

    Raises:
        ConfigError: A table cannot be read.
    """
    setup = parser_setup(config, alignment)
    if setup is None:
        return []
    from shardflow.reports import rules_digest

    tables = [[digest for _, digest in setup[name]] for name in ("anatomy", "findings")]
    rules = alignment.digest() if config.align else None
    return [REPORT_JSON_VERSION, rules_digest(), *tables, setup["extractors"], rules]


class ReportParser:
    """Reads reports; one a process.

    Args:
        setup: From `parser_setup`.
    """

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._setup = setup
        self._reader: ReportReader | None = None

    def check(self) -> None:
        """Find out whether reports can be read with these settings.

        Raises:
            ConfigError: A table or an extractor cannot be used.
        """
        self._reader = self._make_reader()

    def read(self, text: str) -> dict[str, Any]:
        """Return the object of ``report.json``.

        Args:
            text: The report as it is stored.
        """
        if self._reader is None:
            self._reader = self._make_reader()
        return {"format_version": REPORT_JSON_VERSION, **self._reader.read(text).to_json()}

    def align(
        self,
        series: Sequence[Mapping[str, Any]],
        report: Mapping[str, Any],
        annotations: Mapping[str, Any] | None,
        text: str,
    ) -> dict[str, Any] | None:
        """Return the object of ``alignment.json``; None where the settings want none.

        Args:
            series: Those of ``study.json``.
            report: ``report.json``.
            annotations: ``annotations.json``, if there is one.
            text: The report as it is stored.
        """
        if self._setup["alignment"] is None:
            return None
        from shardflow.alignment import AlignmentRules, align

        rules = AlignmentRules(**self._setup["alignment"])
        return align({"series": series}, report, annotations, rules, text=text)

    def _make_reader(self) -> ReportReader:
        from shardflow.reports import ReportReader, load_extractors, load_lexicon

        lexicon = load_lexicon(self._tables("findings"), self._tables("anatomy"))
        wanted = self._setup["extractors"]
        offered = dict(load_extractors()) if wanted else {}
        missing = sorted(set(wanted) - offered.keys())
        if missing:
            raise ConfigError(
                f"reports.extractors must name installed extractors, got {missing[0]!r}; install its package."
            )
        return ReportReader(lexicon, [(name, offered[name]) for name in wanted])

    def _tables(self, name: str) -> list[Path]:
        """Return the tables, if they are still those that the job began with."""
        paths = []
        for text, digest in self._setup[name]:
            path = Path(text)
            if digest_of(path) != digest:
                raise ConfigError(
                    f"the tables of reports.{name} must not change while a job runs, got another one; "
                    "start the job again."
                )
            paths.append(path)
        return paths
