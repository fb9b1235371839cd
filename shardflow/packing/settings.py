"""Settings of single components of a packing job: attachments, reports, de-identification, variants."""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from shardflow.config import Bounds, ByteSize, check_fields
from shardflow.errors import ConfigError, os_reason
from shardflow.format.reasons import Outcome, Reason, outcome_of
from shardflow.format.tables import check_table_name
from shardflow.format.volumes.encoder import BRICK_SHAPE, suits_bricks
from shardflow.packing.deid.pixel_rules import PixelRules, load_rules
from shardflow.packing.deid.pixel_text import MARKERS, as_marker, models_digest
from shardflow.packing.deid.pseudonyms import DateOrder, DatesMode, ReportTextMode

BadInstancePolicy: TypeAlias = Literal["quarantine_study", "drop_instance"]
UncertainIdentity: TypeAlias = Literal["join", "warn", "stop"]
TimeResolution: TypeAlias = Literal["second", "minute", "hour", "day"]

KeyKind: TypeAlias = Literal[
    "study_instance_uid",
    "accession_number",
    "patient_id",
    "series_instance_uid",
    "sop_instance_uid",
    "sample_key",
    "path",
]
"""What the rows of a table of labels are found by."""

_KIND = re.compile(r"[a-z0-9-]{1,32}")
_GIB = 1 << 30
_MAX_BRICK_SIDE = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig:
    """Treatment of defective inputs."""

    require_report: bool = False
    """Skip studies that no report names."""
    on_bad_instance: BadInstancePolicy = "quarantine_study"
    """Whether one unreadable image quarantines its study, or is left out and reported."""
    drop_reasons: tuple[str, ...] = (Reason.UNSUPPORTED_TRANSFER_SYNTAX.value,)
    """Reasons for which an image is left out alone, whatever ``on_bad_instance`` says. By default that of
    encodings that nothing here reads, such as video: the other images of the study are whole."""
    max_quarantined_share: Annotated[float, Bounds(0, 1)] = 0.05
    """Largest share of inputs (files and reports) that may be quarantined; above it nothing is published."""

    def __post_init__(self) -> None:
        check_fields(self)
        quarantined = {reason.value for reason in Reason if outcome_of(reason) is Outcome.QUARANTINED}
        unknown = sorted(set(self.drop_reasons) - quarantined)
        if unknown:
            raise ConfigError(
                f"policy.drop_reasons must name reasons of quarantined files, got {unknown[0]!r}; "
                "docs/howto/quarantine.md lists them."
            )

    def takes_study(self, reason: str) -> bool:
        """Return whether an image that is quarantined for a reason takes its study with it."""
        return self.on_bad_instance == "quarantine_study" and reason not in self.drop_reasons


@dataclass(frozen=True, kw_only=True, slots=True)
class AttachmentsConfig:
    """Files of a study that are not images; docs/attachments.md lists the kinds."""

    enabled: bool = True
    """Whether they are packed; if not, they are skipped like any file that is not an image."""
    leave_out: tuple[str, ...] = ()
    """Kinds that are not packed, such as ``fhir``."""
    window_hours: Annotated[int, Bounds(0, 24 * 366)] = 24
    """Maximum distance in time between a record that names only its patient and the patient's study."""
    max_bytes: Annotated[ByteSize, Bounds(1)] = _GIB
    """Maximum size of a file that is read."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in self.leave_out:
            if not _KIND.fullmatch(name):
                raise ConfigError(
                    f"attachments.leave_out must hold names of [a-z0-9-], got {name!r}; "
                    "see docs/attachments.md."
                )

    def content(self) -> dict[str, Any] | None:
        """Return what decides the dataset's bytes; None at the defaults."""
        if self == AttachmentsConfig():
            return None
        return {**asdict(self), "leave_out": sorted(self.leave_out)}


@dataclass(frozen=True, kw_only=True, slots=True)
class TableFile:
    """A table of labels or other columns that is attached to every version that is packed."""

    file: Path
    """CSV, JSON lines (both also .gz) or Parquet, read again by each job."""
    name: str
    """Of the table; its columns are ``NAME.COLUMN``."""
    on: KeyKind
    """What its rows are found by."""
    unit: Literal["study", "series", "image"] | None = None
    """What a row describes; by default what the key names."""
    key_column: str | None = None
    """Column of the keys; by default the one named like ``on``."""
    columns: tuple[str, ...] | None = None
    """Columns to take; by default all that look like none of identifiers, dates or free text."""
    types: dict[str, Literal["bool", "int", "float", "category", "string", "floats"]] = field(
        default_factory=dict
    )
    """Kinds of columns that are not to be found from their values."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_table_name(self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportsConfig:
    """Reading of reports."""

    extract: bool = True
    """Whether ``report.json`` is written: sections, findings and the images that the report names."""
    findings: tuple[Path, ...] = ()
    """Tables of findings that extend and override the shipped one (docs/reports.md)."""
    anatomy: tuple[Path, ...] = ()
    """Tables of anatomy, likewise."""
    lexicon: str = ""
    """Name of a lexicon that an installed package offers, in place of the shipped one."""
    extractors: tuple[str, ...] = ()
    """Names of further extractors from installed packages."""
    model: Path | None = None
    """Folder of a token classifier whose findings are added to those of the rules (docs/reports.md)."""
    model_device: str = "cpu"
    """Where it runs: ``cpu``, or a device of torch such as ``cuda``."""
    model_cache: Path | None = None
    """Folder that keeps what the model found, by the digest of model and text; it holds no texts."""
    align: bool = True
    """Whether ``alignment.json`` is written: which slices show the findings of the report.
    Needs ``extract``."""

    def __post_init__(self) -> None:
        check_fields(self)

    def content(self) -> dict[str, Any] | None:
        """Return what decides the dataset's bytes; None at the defaults.

        Raises:
            ConfigError: A table cannot be read.
        """
        if replace(self, model_device="cpu", model_cache=None) == ReportsConfig():
            return None
        # A setting of later versions is no part of what identifies content unless it is used.
        given = {name: value for name, value in asdict(self).items() if name != "lexicon" or value}
        # Neither does where a model runs, or what it has read before, change what it finds.
        for name in ("model", "model_device", "model_cache"):
            del given[name]
        if self.model is not None:
            from shardflow.reports.token_classifier import model_digest

            given["model_sha256"] = model_digest(self.model, "reports.model")
        return {
            **given,
            "anatomy": [digest_of(path) for path in self.anatomy],
            "extractors": sorted(self.extractors),
            "findings": [digest_of(path) for path in self.findings],
        }


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a table.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(
            f"reports.findings and reports.anatomy must name readable tables, got {os_reason(error)}; "
            "check the paths."
        ) from None


_PIXEL_TEXT_SHARE: Final = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class DeidConfig:
    """De-identification beyond the allowlist and the surrogates."""

    report_text: ReportTextMode = "strict"
    """``strict``: values of the study's headers, patterns, and words that are on no list are replaced.
    ``scrub``: without the last. ``keep``: reports stay unchanged, because they are already de-identified."""
    model: Path | None = None
    """Local folder of a token-classification model of transformers that searches reports beside the rules
    (extra ``deid-model``; raise ``execution.memory_bytes`` by its size and about 2 GiB)."""
    recognizers: tuple[str, ...] = ()
    """Names of recognizers that installed packages offer, which search reports and other texts beside the
    rules; see docs/extending.md."""
    date_order: DateOrder = "unknown"
    """How reports write 03/04/2019: ``mdy``, ``dmy``, or ``unknown``, which removes such dates."""
    dates: DatesMode = "days"
    """``days``: studies and dates in reports as distances in days. ``shift``: dates, moved by one keyed
    number of days a patient. ``remove``: neither."""
    shift_keeps_weekday: bool = False
    """Whether dates are moved by whole weeks."""
    times: TimeResolution = "second"
    """Resolution of the distances in time between images, and records and recordings; they are rounded up.
    ``day``: whole days alone."""
    accept: tuple[str, ...] = ()
    """Names of rules for burned-in text whose images are packed nevertheless, such as ``ultrasound``."""
    trust_declared_clean: bool = False
    """Whether BurnedInAnnotation = NO in a file clears a suspicion."""
    face_risk: Literal["flag", "quarantine", "deface"] = "flag"
    """Treatment of head volumes, whose surface is a face; found by words of the header, and by the volume.
    ``deface`` cuts the face off for good, and holds back what it cannot cut."""
    on_uncertain_identity: UncertainIdentity = "warn"
    """Treatment of patient IDs that may be one person: ``join`` puts them into one split, ``warn`` lists them
    in the private folder, ``stop`` lists them and packs nothing."""
    identity_map: Path | None = None
    """CSV file of decisions on such pairs; see docs/deidentification.md."""
    rules_file: Path | None = None
    """TOML file of further rules and blackout boxes; see docs/deidentification.md."""
    pixel_text: Literal["off", "blank"] = "off"
    """``blank``: images that rules suspect of burned-in text, and a share of all others, are searched for
    text (extra ``pixels``). It is blanked, and they are packed; pages of text are still held back."""
    pixel_text_share: Annotated[float, Bounds(0.0, 1.0)] = _PIXEL_TEXT_SHARE
    """Share of the images that no rule suspects to search for text; where one shows some, all of its series
    are searched."""
    pixel_text_keep: tuple[str, ...] = MARKERS
    """Texts in images that stay, such as ``L`` and ``RMLO``, in capitals."""

    def __post_init__(self) -> None:
        check_fields(self)
        for text in self.pixel_text_keep:
            if not text or text != as_marker(text):
                raise ConfigError(
                    f"deid.pixel_text_keep must hold texts of capitals and digits alone, got {text!r}; write "
                    f"{as_marker(text) or 'L'!r}."
                )
        # A setting without effect would promise a search that does not happen.
        for name, default in (("pixel_text_share", _PIXEL_TEXT_SHARE), ("pixel_text_keep", MARKERS)):
            if self.pixel_text == "off" and getattr(self, name) != default:
                raise ConfigError(
                    f'deid.{name} has no effect while deid.pixel_text is "off", which searches no pixel; set '
                    f'deid.pixel_text = "blank", or leave deid.{name} out.'
                )

    def rules_text(self) -> tuple[str, ...]:
        """Return the site's own rules.

        Raises:
            ConfigError: The file cannot be read.
        """
        if self.rules_file is None:
            return ()
        try:
            return (self.rules_file.read_text(encoding="utf-8"),)
        except (OSError, UnicodeError) as error:
            raise ConfigError(
                f"deid.rules_file must be a readable UTF-8 file, got {os_reason(error)}; check the path."
            ) from None

    def rules(self) -> PixelRules:
        """Return all pixel rules.

        Raises:
            ConfigError: The site's own rules are invalid, or ``accept`` names a rule that does not exist.
        """
        rules = load_rules(*self.rules_text())
        rules.check_names(self.accept)
        return rules

    def content(self) -> dict[str, Any]:
        """Return what decides bytes, as JSON."""
        content = {**asdict(self), "accept": sorted(self.accept), "rules_sha256": self.rules().digest}
        # The splits show in the plan's digest; decisions must not end a dataset.
        for name in ("rules_file", "identity_map", "on_uncertain_identity", "model"):
            del content[name]
        if self.model is not None:
            from shardflow.reports.token_classifier import model_digest

            content["model_sha256"] = model_digest(self.model, "deid.model")
        if not self.recognizers:
            del content["recognizers"]
        else:
            from shardflow.packing.registry import offered_recognizers

            found = offered_recognizers(self.recognizers)
            content["recognizers"] = [
                [one.name, "" if one.dist is None else one.dist.version] for one in found
            ]
        if self.times == "second":  # settings older than this one keep their digest
            del content["times"]
        if self.pixel_text == "off":
            for name in ("pixel_text", "pixel_text_share", "pixel_text_keep"):
                del content[name]
        else:
            content["pixel_text_share"] = repr(self.pixel_text_share)  # canonical JSON has no floats
            content["pixel_text_keep"] = sorted({*self.pixel_text_keep})
            content["pixel_text_sha256"] = models_digest()
        # Sorted: fragments depend on a digest of this very text.
        return dict(sorted(content.items()))


@dataclass(frozen=True, kw_only=True, slots=True)
class VolumesConfig:
    """Storage of series that are volumes: 3-D, of one value a voxel."""

    storage: Literal["slices", "bricks"] = "slices"
    """``bricks`` stores each as one member of small boxes, for crops; shardflow before format 2 cannot read
    it. ``slices`` stores one member a slice."""
    modalities: tuple[str, ...] = ()
    """Modalities to store in bricks, such as CT and MR; empty for all."""
    brick_shape: tuple[int, ...] = BRICK_SHAPE
    """Largest size of a brick: slices, rows, columns."""

    def __post_init__(self) -> None:
        check_fields(self)
        if len(self.brick_shape) != len(BRICK_SHAPE) or not all(
            1 <= size <= _MAX_BRICK_SIDE for size in self.brick_shape
        ):
            raise ConfigError(
                "volumes.brick_shape must be three sizes (slices, rows, columns) from 1 to "
                f"{_MAX_BRICK_SIDE}, got {list(self.brick_shape)}; {list(BRICK_SHAPE)} suits most volumes."
            )

    def content(self) -> dict[str, Any] | None:
        """Return the settings as JSON; None for slices, so that older settings keep their digest."""
        if self.storage == "slices":
            return None
        return {
            "brick_shape": list(self.brick_shape),
            "modalities": sorted({*self.modalities}),
            "storage": self.storage,
        }

    def has_bricks(self, *, kind: str, modality: Any, num_slices: int, num_samples: int) -> bool:
        """Return whether a series is stored in bricks.

        Args:
            kind: ``volume`` or another kind of series.
            modality: Of the series, if known.
            num_slices: Of the series.
            num_samples: Values a pixel.
        """
        is_volume = suits_bricks(kind=kind, num_slices=num_slices, num_samples=num_samples)
        is_wanted = not self.modalities or modality in self.modalities
        return self.storage == "bricks" and is_volume and is_wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class SlidesConfig:
    """Storage of whole slides."""

    mpp: tuple[Annotated[float, Bounds(0.01, 100.0)], ...] = ()
    """Resolutions to store, in microns per pixel, such as 0.5 and 2: for each the coarsest level of a slide
    that is at least as fine; empty for all levels."""
    tissue_only: bool = True
    """Whether only tiles with tissue are stored, and those beside them; False stores all."""

    def __post_init__(self) -> None:
        check_fields(self)

    def content(self) -> dict[str, Any] | None:
        """Return the settings as JSON without fractions; None at the defaults."""
        if self == SlidesConfig():
            return None
        return {"mpp": sorted({repr(float(mpp)) for mpp in self.mpp}), "tissue_only": self.tissue_only}


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolConfig:
    """Augmented variants of every slice, within what their modality allows; none by default.

    Numbers are drawn for each study and variant, keyed by the study's key.
    """

    num_variants: Annotated[int, Bounds(0, 99)] = 0
    """Variants of each study, equal for all its slices. Each takes as many bytes as the slices."""
    rotate_deg: Annotated[float, Bounds(0.0, 180.0)] = 10.0
    """Maximum rotation, in either direction."""
    zoom: Annotated[float, Bounds(0.0, 1.0)] = 0.1
    """Maximum enlargement as a share, so that a crop fills the frame."""
    shift: Annotated[float, Bounds(0.0, 1.0)] = 0.05
    """Maximum translation as a share of width and height."""
    intensity: Annotated[float, Bounds(0.0, 1.0)] = 0.0
    """Maximum change of gain, offset and gamma as a share, inside the display range, which clips the rest;
    never applied where intensities are measurements."""
    elastic: Annotated[float, Bounds(0.0, 0.05)] = 0.01
    """Maximum elastic deformation as a share of width and height."""
    mirror: Annotated[float, Bounds(0.0, 1.0)] = 0.0
    """Probability of a left-right mirror image; never applied if report or annotations name a side."""
    flip: Annotated[float, Bounds(0.0, 1.0)] = 0.0
    """Probability of a top-bottom flip, for modalities without a fixed top."""
    seed: int = 0
    """Seed of the drawn numbers."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantsConfig:
    """Variants that are packed beside the slices; none by default."""

    thumbnail_px: Annotated[int, Bounds(0, 1024)] = 0
    """Longer side of a JPEG of the middle slice of every series, in its display range; 0 for none."""
    small_px: Annotated[int, Bounds(0, 4096)] = 0
    """Longer side of a small version of every slice, in its unit, averaged by area; 0 for none."""
    augment: PoolConfig = field(default_factory=PoolConfig)

    def __post_init__(self) -> None:
        check_fields(self)

    def content(self) -> dict[str, Any]:
        """Return the settings as JSON without fractions; those of augmentation only if it is enabled."""
        content: dict[str, Any] = {"thumbnail_px": self.thumbnail_px, "small_px": self.small_px}
        if self.augment.num_variants:
            pool = asdict(self.augment)
            content["augment"] = {
                name: repr(value) if isinstance(value, float) else value for name, value in pool.items()
            }
        return content
