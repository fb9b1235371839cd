"""Task handlers of packing processes: the setup of all tasks, and the function for each kind of task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardflow.errors import ConfigError, SourceError
from shardflow.packing.deid.pixel_rules import load_rules
from shardflow.packing.deid.pixel_text import TextFinder
from shardflow.packing.deid.pseudonyms import SecretKey
from shardflow.packing.engines.base import decode
from shardflow.packing.engines.worker import answering
from shardflow.packing.registry import attachment_kinds, offered_recognizers
from shardflow.packing.scan import AttachmentFinder, Scanner
from shardflow.packing.settings import (
    AttachmentsConfig,
    DeidConfig,
    PolicyConfig,
    SlidesConfig,
    VariantsConfig,
    VolumesConfig,
)
from shardflow.packing.sources.dicom.elements import HeaderLimits
from shardflow.packing.studies.assembly import Assembler
from shardflow.packing.studies.pictures import PictureMaker, PictureTask
from shardflow.packing.studies.privacy import PrivacyRules
from shardflow.packing.studies.report_content import (
    ReadingSetup,
    ReportParser,
    count_languages,
    reading_setup,
)
from shardflow.packing.studies.study import StudyPacker, StudyRules
from shardflow.packing.studies.tasks import (
    CheckTask,
    DocumentDone,
    DocumentTask,
    LanguagesTask,
    ProbeTask,
    ScanTask,
    ShardTask,
    StudyTask,
)
from shardflow.packing.workspace import Workspace

if TYPE_CHECKING:
    from shardflow.packing.config import PackConfig
    from shardflow.packing.deid.report_text import Family
    from shardflow.packing.engines.worker import Handler


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSetup:
    """Setup of a packing process."""

    workspace: Workspace
    key_file: Path
    """The secret key is sent as the path of its file."""
    roots: tuple[Path, ...]
    """Input folders: those of images, then those of attachments alone."""
    num_image_roots: int
    codec: str
    splits: tuple[str, ...]
    limits: HeaderLimits
    policy: PolicyConfig
    variants: VariantsConfig
    volumes: VolumesConfig
    slides: SlidesConfig
    deid: DeidConfig
    pixel_rules: tuple[str, ...]
    """Texts of the site's own rules, because their file may change while the job runs."""
    attachments: AttachmentsConfig
    reading: ReadingSetup | None
    """Settings for reading reports; None if they are not read."""
    clinical: str
    """Settings of clinical records, as text."""


def make_setup(config: PackConfig, workspace: Workspace) -> PackSetup:
    """Return the setup of the packing processes.

    Raises:
        ConfigError: A table, an extractor or a kind of attachments in the settings is not available.
    """
    reading, clinical = reading_setup(config.reports, config.alignment), config.records.to_text()
    # Checked once, here: in a packing process it would fail every input.
    if reading is not None and (
        reading.findings or reading.anatomy or reading.extractors or reading.model is not None
    ):
        ReportParser(reading).check()
    _recognizer(config.deid)
    if config.deid.pixel_text != "off":
        TextFinder()
    if config.attachments.leave_out:
        known = {kind.name for kind in attachment_kinds(clinical)}
        unknown = sorted(set(config.attachments.leave_out) - known)
        if unknown:
            raise ConfigError(
                f"attachments.leave_out must name kinds of attachments ({', '.join(sorted(known))}), got "
                f"{unknown[0]!r}; correct it."
            )
    return PackSetup(
        workspace=workspace,
        key_file=config.key_file,
        roots=config.inputs.roots,
        num_image_roots=len(config.inputs.dicom),
        codec=config.shards.codec,
        splits=tuple(config.splits),
        limits=HeaderLimits(
            **{field.name: getattr(config.limits, field.name) for field in fields(HeaderLimits)}
        ),
        policy=config.policy,
        variants=config.variants,
        volumes=config.volumes,
        slides=config.slides,
        deid=replace(config.deid, rules_file=None),
        pixel_rules=config.deid.rules_text(),
        attachments=config.attachments,
        reading=reading,
        clinical=clinical,
    )


def load_ahead(config: PackConfig) -> None:
    """Load what each packing process loads for its first report, to be shared by those that are forks."""
    if config.inputs.reports is not None and config.execution.engine == "local":
        from shardflow.packing.deid import known_values, report_text  # noqa: F401 - as `StudyPrivacy` does
        from shardflow.reports.detection import detect_languages

        detect_languages("")


def make_handler(fields: Mapping[str, Any]) -> Handler:
    """Make the task handler of a packing process.

    Args:
        fields: A `PackSetup` as JSON.

    Raises:
        ConfigError: The key file cannot be used.
    """
    setup = decode(PackSetup, fields)
    key = SecretKey.load(setup.key_file)
    finder = AttachmentFinder(
        limits=setup.limits,
        max_bytes=setup.attachments.max_bytes,
        leave_out=setup.attachments.leave_out,
        records=setup.clinical,
    )
    scanner = Scanner(
        roots=setup.roots,
        folder=setup.workspace.headers,
        key=key,
        limits=setup.limits,
        splits=setup.splits,
        finder=finder if setup.attachments.enabled else None,
        num_image_roots=setup.num_image_roots,
    )
    packer = StudyPacker(
        workspace=setup.workspace,
        roots=setup.roots,
        rules=StudyRules(
            key=key,
            limits=setup.limits,
            codec=setup.codec,
            variants=setup.variants,
            volumes=setup.volumes,
            slides=setup.slides,
            policy=setup.policy,
            privacy=PrivacyRules(
                key=key,
                settings=setup.deid,
                pixels=load_rules(*setup.pixel_rules),
                recognize=_recognizer(setup.deid),
                text=None if setup.deid.pixel_text == "off" else TextFinder(setup.deid.pixel_text_keep),
            ),
            records=setup.clinical,
            reading=None if setup.reading is None else ReportParser(setup.reading),
        ),
    )
    assembler = Assembler(workspace=setup.workspace)
    pictures = PictureMaker(workspace=setup.workspace, roots=setup.roots, limits=setup.limits)
    return answering(
        {
            "check": (CheckTask, assembler.check),
            "document": (DocumentTask, _read_document),
            "languages": (LanguagesTask, partial(count_languages, setup.workspace.reports)),
            "picture": (PictureTask, pictures.make),
            "probe": (ProbeTask, scanner.probe),
            "scan": (ScanTask, scanner.scan),
            "shard": (ShardTask, assembler.assemble),
            "study": (StudyTask, packer.pack),
        }
    )


def _read_document(task: DocumentTask) -> DocumentDone:
    try:
        return DocumentDone(text=task.document.read())
    except SourceError as error:
        return DocumentDone(reason=error.reason)


def _recognizer(settings: DeidConfig) -> Family | None:
    """Load what searches texts beside the rules: a model, for which alone torch is imported, and recognizers.

    Raises:
        ConfigError: One of them cannot be used.
    """
    if settings.model is None and not settings.recognizers:
        return None
    # Imported for texts alone: their patterns take long to compile.
    from shardflow.packing.deid.report_text import load_recognizers

    models: list[Family] = []
    if settings.model is not None:
        from shardflow.packing.deid.report_text import TextModel

        models.append(TextModel(settings.model).find)
    return load_recognizers(offered_recognizers(settings.recognizers), *models)
