"""Contents of a report: ``report.json`` with its findings, ``alignment.json`` with the slices that show them.

The lexicon and its automaton are built for the first report that a process packs, so that a job without
reports loads neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardflow.errors import ConfigError
from shardflow.packing.engines.base import Engine, Task, decode, run_each, step
from shardflow.packing.linking import read_report
from shardflow.packing.settings import ReportsConfig, digest_of
from shardflow.packing.studies.tasks import LanguagesDone, LanguagesTask

if TYPE_CHECKING:
    from shardflow.packing.linking import ReportPlace, ReportTable
    from shardflow.reports import Extractor, Lexicon, ReportReader
    from shardflow.reports.alignment.evidence import AlignmentRules

REPORT_JSON_VERSION: Final = 1
UNKNOWN_RULES: Final = "unknown"
"""Stands for the rules of reports that an earlier shardflow packed."""
_MAX_LOOKED_AT: Final = 10_000
"""Reports whose language is looked at before packing."""
_LOOKED_AT_ONCE: Final = 500
"""Reports of a task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableFile:
    """A table of findings or anatomy that the settings name."""

    path: Path
    sha256: str

    @classmethod
    def of(cls, path: Path) -> TableFile:
        """Compute the digest of a table.

        Raises:
            ConfigError: The table cannot be read.
        """
        return cls(path=path.absolute(), sha256=digest_of(path))


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadingSetup:
    """Settings of a packing process for reading reports."""

    alignment: dict[str, Any] | None
    """Fields of `AlignmentRules`; None if reports are not aligned with slices."""
    anatomy: tuple[TableFile, ...]
    findings: tuple[TableFile, ...]
    extractors: tuple[str, ...]
    lexicon: str = ""
    model: Path | None = None
    model_sha256: str = ""
    model_device: str = "cpu"
    model_cache: Path | None = None


def reading_setup(config: ReportsConfig, alignment: AlignmentRules) -> ReadingSetup | None:
    """Return the settings for reading reports; None if they are not read.

    Raises:
        ConfigError: A table or the model cannot be read.
    """
    if not config.extract:
        return None
    return ReadingSetup(
        alignment=asdict(alignment) if config.align else None,
        anatomy=tuple(map(TableFile.of, config.anatomy)),
        findings=tuple(map(TableFile.of, config.findings)),
        extractors=tuple(sorted(config.extractors)),
        lexicon=config.lexicon,
        model=None if config.model is None else config.model.absolute(),
        model_sha256=_model_digest(config),
        model_device=config.model_device,
        model_cache=None if config.model_cache is None else config.model_cache.absolute(),
    )


def _model_digest(config: ReportsConfig) -> str:
    if config.model is None:
        return ""
    from shardflow.reports.token_classifier import model_digest

    return model_digest(config.model, "reports.model")


def check_languages(
    config: ReportsConfig, reports: ReportTable, engine: Engine, timeout_s: float
) -> str | None:
    """Check that findings of the reports can be aligned: most are in a language that is read.

    At most `_MAX_LOOKED_AT` are looked at, evenly spread, by the packing processes, which need the lexicon
    anyway. Reports whose process fails are looked at again, each alone.

    Args:
        config: Settings; with extractors or a model, which may read any language, there is nothing to check.
        reports: The reports.
        engine: Runs `count_languages`.
        timeout_s: Deadline without progress.

    Returns:
        A note on reports whose process failed twice; None if there are none.

    Raises:
        ConfigError: More than half of the others are in languages without rules.
        StorageError: The texts cannot be read.
        ShardflowError: The packing processes cannot work.
    """
    if not (config.extract and config.align) or config.extractors or config.model is not None:
        return None
    linked = sorted(reports.report_of.values())
    if not linked:
        return None
    from shardflow.reports.language import LANGUAGES

    chosen = linked[:: -(-len(linked) // _MAX_LOOKED_AT)]
    places = list(map(reports.place_of, chosen))
    mains: Counter[str] = Counter()
    for size in (_LOOKED_AT_ONCE, 1):
        batches = [places[at : at + size] for at in range(0, len(places), size)]
        places = []
        for done in run_each(engine, (_language_task(batch, timeout_s) for batch in batches)):
            if done.result is not None:
                mains.update(decode(LanguagesDone, done.result).counts)
            else:
                places += done.task.payload.reports
    num_counted = sum(mains.values())
    others = {name: count for name, count in mains.items() if name not in LANGUAGES}
    if 2 * sum(others.values()) > num_counted:
        usual = max(sorted(others), key=lambda name: others[name])
        raise ConfigError(
            f"reports.align needs reports in {' or '.join(LANGUAGES)}, got {sum(others.values()):,} of "
            f"{num_counted:,} in languages without rules (most of them: {usual}); set reports.align = false."
        )
    if num_counted == len(chosen):
        return None
    return (
        f"the languages of {len(chosen) - num_counted:,} of {len(chosen):,} reports could not be detected: "
        "the packing process failed"
    )


def _language_task(places: Sequence[ReportPlace], timeout_s: float) -> Task:
    payload = LanguagesTask(reports=tuple(places))
    return Task(kind="languages", payload=payload, timeout_s=timeout_s, num_steps=len(places))


def count_languages(spool: Path, task: LanguagesTask) -> LanguagesDone:
    """Count reports by their main language, in a packing process.

    Args:
        spool: File of their texts.
        task: Where they are.

    Raises:
        StorageError: The texts cannot be read.
    """
    from shardflow.reports.detection import detect_languages

    counts: Counter[str] = Counter()
    for place in task.reports:
        step()
        counts[detect_languages(read_report(spool, place).decode("utf-8")).languages[0]] += 1
    return LanguagesDone(counts=counts)


def reading_basis(config: ReportsConfig, alignment: AlignmentRules) -> list[Any]:
    """Return all that both fields depend on, beside the report and the study.

    Raises:
        ConfigError: A table cannot be read.
    """
    setup = reading_setup(config, alignment)
    if setup is None:
        return []
    from shardflow.reports import rules_digest

    tables = [[table.sha256 for table in tables] for tables in (setup.anatomy, setup.findings)]
    rules = None if setup.alignment is None else alignment.digest()
    basis: list[Any] = [REPORT_JSON_VERSION, rules_digest(), *tables, list(setup.extractors), rules]
    if setup.lexicon:
        from shardflow.reports.lexicon import named_lexicon

        basis.append(named_lexicon(setup.lexicon).digest())
    if setup.model_sha256:
        basis.append({"model_sha256": setup.model_sha256})
    return basis


def rules_of(content: Mapping[str, Any], alignment: Mapping[str, Any] | None) -> str:
    """Return the rules that read and aligned a report, such as ``rules-8-0123456789abcdef/fedcba9876543210``.

    Args:
        content: ``report.json``.
        alignment: ``alignment.json``, if there is one.
    """
    names = (content.get("reader"), None if alignment is None else alignment.get("rules"))
    return "/".join(str(name) for name in names if name) or UNKNOWN_RULES


class ReportParser:
    """Reader of reports, one for each process.

    Args:
        setup: Its settings.
    """

    def __init__(self, setup: ReadingSetup) -> None:
        self._setup = setup

    def check(self) -> None:
        """Build the reader, to check the settings.

        Raises:
            ConfigError: A table or an extractor cannot be used.
        """
        self._reader  # noqa: B018 - built by its first use

    def read(self, text: str) -> dict[str, Any]:
        """Return the object of ``report.json``.

        Args:
            text: The report as it is stored.
        """
        from shardflow.reports.reader import reader_name

        content = self._reader.read(text).to_json()
        return {"format_version": REPORT_JSON_VERSION, "reader": reader_name(), **content}

    def align(
        self,
        series: Sequence[Mapping[str, Any]],
        report: Mapping[str, Any],
        annotations: Mapping[str, Any] | None,
        text: str,
    ) -> dict[str, Any] | None:
        """Return the object of ``alignment.json``; None if the settings do not ask for it.

        Args:
            series: Those of ``study.json``.
            report: ``report.json``.
            annotations: ``annotations.json``, if there is one.
            text: The report as it is stored.
        """
        if self._rules is None:
            return None
        from shardflow.reports.alignment.aligning import align

        return align({"series": series}, report, annotations, self._rules, text=text)

    @cached_property
    def _rules(self) -> AlignmentRules | None:
        if self._setup.alignment is None:
            return None
        from shardflow.reports.alignment.evidence import AlignmentRules

        return AlignmentRules(**self._setup.alignment)

    @cached_property
    def _reader(self) -> ReportReader:
        from shardflow.reports import ReportReader, load_extractors, load_lexicon

        setup = self._setup
        tables = _unchanged(setup.findings, "findings"), _unchanged(setup.anatomy, "anatomy")
        wanted = setup.extractors
        offered = dict(load_extractors()) if wanted else {}
        missing = sorted(set(wanted) - offered.keys())
        if missing:
            raise ConfigError(
                f"reports.extractors must name installed extractors, got {missing[0]!r}; install its package."
            )
        extractors: list[tuple[str, Extractor]] = [(name, offered[name]) for name in wanted]

        def lexicon_of(language: str) -> Lexicon:
            return load_lexicon(*tables, setup.lexicon, language)

        if setup.model is not None:
            extractors.append(("model", self._model(setup.model, lexicon_of)))
        return ReportReader(lexicon_of, extractors)

    def _model(self, folder: Path, lexicon_of: Callable[[str], Lexicon]) -> Extractor:
        from shardflow.reports.model_extractor import ModelExtractor
        from shardflow.reports.token_classifier import model_digest

        setup = self._setup
        if model_digest(folder, "reports.model") != setup.model_sha256:
            raise ConfigError(
                "the folder of reports.model must not change while a job runs, got another one; start the "
                "job again."
            )
        return ModelExtractor(
            folder, device=setup.model_device, cache=setup.model_cache, lexicon_of=lexicon_of
        )


def _unchanged(tables: Sequence[TableFile], name: str) -> list[Path]:
    """Return the tables, provided that they have not changed since the job started."""
    for table in tables:
        if digest_of(table.path) != table.sha256:
            raise ConfigError(
                f"the tables of reports.{name} must not change while a job runs, got another one; "
                "start the job again."
            )
    return [table.path for table in tables]
