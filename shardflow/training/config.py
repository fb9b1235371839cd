"""Settings of a training run: one frozen dataclass for each table of the TOML file, and `TrainConfig`.

Holds the names, defaults and ranges of every setting of ``shardflow train``; `shardflow.config` reads the
files. Imports no torch, so that a wrong setting is reported before seconds of imports. Every instance is
consistent: each table validates itself, and `TrainConfig` what two tables must agree on. A component receives
its own tables; only ``run`` sees the whole `TrainConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from shardflow.config import Bounds, ByteSize, Place, check_fields
from shardflow.errors import ConfigError
from shardflow.fields.field import Field, check_names
from shardflow.fields.registry import FieldTables
from shardflow.fields.types.pictures import Slices
from shardflow.fields.types.pixel_field import PixelField
from shardflow.fields.types.text import Text
from shardflow.loading.config import check_servers
from shardflow.loading.rows.selection import FULL_STUDY
from shardflow.monitoring.outlets import SINKS, check_metrics_address
from shardflow.sampling import Sampling
from shardflow.storage import CacheConfig
from shardflow.training.model_fields import (
    IMAGE_FIELD,
    REPORT_FIELD,
    AugmentConfig,
    TaskConfig,
    VolumeAugmentConfig,
    check_classify_fields,
    check_conversation_fields,
    check_report_fields,
    check_segment_fields,
    check_stored_reference,
)
from shardflow.training.rates import OptimizerConfig

_FIRST_SERIES: Final = "series == 0"
"""The primary series of a study, see docs/format.md."""
_NUM_SLICES: Final = 8
Count = Annotated[int, Bounds(1)]
CountOrZero = Annotated[int, Bounds(0)]
_LONGEST_S = 10_000_000.0  # four months; larger values overflow some clocks of the system
Seconds = Annotated[float, Bounds(0.1, _LONGEST_S)]
SecondsOrZero = Annotated[float, Bounds(0.0, _LONGEST_S)]
ByteSizeOrZero = Annotated[ByteSize, Bounds(0)]


def changed_settings(config: Any) -> list[str]:
    """Return the names of a table's settings that differ from their defaults."""
    return [one.name for one in fields(config) if getattr(config, one.name) != one.default]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The training data."""

    dataset: Place
    """Folder or address of a packed dataset, or a blend file (``.toml``), whose components name their
    splits."""
    manifest_version: Count | None = None
    """Version to open; without it a fresh run takes the newest, a resumed one the version it began with."""
    unit: Literal["study", "series", "image"] = "study"
    """What a sample is."""
    view: str = FULL_STUDY
    """Name of an entity view that ``shardflow entities`` made: then a sample is a finding of a report."""
    train_split: str = "train"
    """Split that is trained on, or several joined by ``+``."""
    where: str | None = None
    """Expression that selects the samples trained on, such as ``facts.modality == 'CT'``."""
    keys: Path | None = None
    """File of sample keys, one a line: only these are trained on."""
    eval_split: str = ""
    """Split whose loss is measured; empty measures none. Of a blend: that of all its datasets."""
    transform: tuple[str, ...] = ()
    """Functions ``"package.module:function"`` that each sample passes, see docs/fields.md; none in
    evaluations."""
    adopt_new_versions: Literal["never", "epoch"] = "never"
    """``epoch``: train each epoch on the newest version of the dataset when it begins, if it descends from
    the one before. Rank 0 decides; the length of the run and its schedule follow."""
    trusted_keys: Path | None = None
    """File of public keys, OpenSSH's allowed signers or a ``.pub`` file: each dataset of the run must be
    signed by one of them (``shardflow sign``), with the tables that are read; every rank checks it."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.adopt_new_versions != "never" and (self.is_blend or self.manifest_version is not None):
            why = "data.dataset is a blend file" if self.is_blend else "data.manifest_version pins one"
            raise ConfigError(f"data.adopt_new_versions takes newer versions, but {why}; leave out one.")
        if self.is_blend:
            of_run = {"dataset", "eval_split", "transform", "trusted_keys"}
            given = [name for name in changed_settings(self) if name not in of_run]
            if given:
                raise ConfigError(
                    f"data.{given[0]} is set although data.dataset is a blend file; remove it, and set it "
                    "for each component in the file."
                )
        if self.view != FULL_STUDY and self.unit != "study":
            raise ConfigError(f"data.unit is {self.unit!r} although data.view names findings; leave out one.")

    @property
    def is_blend(self) -> bool:
        """Whether ``dataset`` names a blend file."""
        return self.dataset.endswith(".toml")


def _in_field(setting: str) -> str:
    return f'write {setting} in [fields.image], with type = "slices".'


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageConfig:
    """The images that the model takes; the device makes them of those that the field ``image`` delivers."""

    rows: Count = 64
    columns: Count = 64
    standardize: tuple[str, ...] = ()
    """Modalities, such as ``["MR"]``, whose images get their own mean 0 and deviation 1 in place of a
    window."""
    compile: bool = False
    """Compile the device's image operators with ``torch.compile``."""

    moved_keys: ClassVar[Mapping[str, str]] = {
        **{
            name: _in_field(name)
            for name in ("num_slices", "resolution", "dtype", "padding", "fit", "windows", "augment_pool")
        },
        "slice_choice": _in_field("sampling"),
        "transfer_rows": _in_field("size = [ROWS, COLUMNS]"),
        "transfer_columns": _in_field("size = [ROWS, COLUMNS]"),
        "sizes": _in_field("sizes = [[SLICES, ROWS, COLUMNS, WEIGHT], ...]"),
        "max_tiles": _in_field("tiles, with the size of a tile as size"),
        "transform": "write data.transform; its result is used, see docs/fields.md.",
        "standardise": "write image.standardize.",
    }

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextConfig:
    """Tokenization of reports."""

    tokenizer: Path | None = None
    """Folder of a ``PreTrainedTokenizerFast``; ``shardflow train-tokenizer`` makes one. A task of reports
    needs it."""
    max_tokens: Annotated[int, Bounds(2)] = 256
    """Longer reports are cut; counts the begin and end tokens."""
    prompt: str = "Describe the findings."
    """The user's words after the slices, in the chat template of a LLaVA-style model; never predicted."""

    moved_keys: ClassVar[Mapping[str, str]] = {
        "tokens": (
            'for stored tokens write [fields.report] with type = "tokens", flat = true and the digest that '
            "shardflow tokenize printed as tokenizer."
        )
    }

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def folder(self) -> Path:
        """The tokenizer of a task that has one."""
        assert self.tokenizer is not None  # noqa: S101 - checked when the settings were read
        return self.tokenizer


_OF_BUDGET = {"text_tokens", "max_samples", "over_budget", "quadratic_tokens"}
_OF_BUDGET |= {"image_tokens_per_slice", "counts_delivered"}


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """The batch spec of the epoch plan; a part of the run's identity."""

    micro_batch_size: Count | None = None
    """Samples in one forward and backward of one rank; this or ``max_tokens``."""
    max_tokens: Count | None = None
    """Token budget of a micro-batch instead; padding counted, but where ``packed``."""
    packed: bool = False
    """All samples of a micro-batch share one sequence, each attending to itself alone, and nothing is
    padded."""
    text_tokens: Literal["estimated", "counted"] = "estimated"
    """Tokens of text under ``max_tokens``: from the bytes of a report, or as ``shardflow tokenize`` counted
    them for the run's tokenizer."""
    max_samples: Count = 64
    """Samples of a micro-batch under ``max_tokens``, whatever their length."""
    over_budget: Literal["alone", "skip", "truncate"] = "alone"
    """A sample longer than ``max_tokens``: a micro-batch of its own, left out, or counted as cut."""
    image_tokens_per_slice: CountOrZero = 0
    """Counted towards ``max_tokens`` for each stored slice or tile, up to the places of ``fields.image``."""
    counts_delivered: bool = False
    """Counts what the fields deliver, from tables, in place of what is stored: the pictures of all fields."""
    quadratic_tokens: CountOrZero = 0
    """Length at which attention costs as much as all the rest; ranks are balanced by it. 0 leaves it out."""
    lanes: CountOrZero | None = None
    """Lanes that samples are mixed in; 0 mixes the whole epoch. Not given: 0, and under ``max_tokens`` a
    number chosen from the data."""
    window_bytes: ByteSize = 1024**3
    """How much of a lane is mixed at a time."""
    micro_batches_per_step: Count
    """Micro-batches in one optimizer step over all ranks (M): ``world_size * accumulation`` fills exactly."""
    tail: Literal["drop", "repeat", "mask"] = "drop"

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.micro_batch_size is None) == (self.max_tokens is None):
            found = "neither" if self.max_tokens is None else "both"
            raise ConfigError(f"batch must have one of micro_batch_size and max_tokens, got {found}.")
        if self.max_tokens is None:
            given = [name for name in changed_settings(self) if name in _OF_BUDGET]
            if given:
                raise ConfigError(
                    f"batch.{given[0]} needs batch.max_tokens, which is not set; remove it, or set a budget."
                )
        if self.max_tokens is not None and self.lanes == 0:
            raise ConfigError(
                "batch.lanes must be at least 1 under max_tokens, got 0; leave it out to have it chosen."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A small model of these numbers, one of transformers from a folder, or what a function returns."""

    target: str = ""
    """Function or class ``"package.module:function"`` that returns it, such as ``"timm:create_model"``. A
    classifier takes ``(B, C, rows, columns)``, a model of volumes ``(B, C, D, H, W)`` float32, and both give
    logits; what one of conversations takes is in docs/howto/conversations.md."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """What it is called with."""
    path: Path | None = None
    """Folder of a model of transformers, in place of the numbers below; reports take LLaVA-style ones and
    vision encoder-decoders."""
    weights: Literal["stored", "random"] = "stored"
    """Of the folder: its safetensors, or only its ``config.json``, with weights that follow from the seed."""
    frozen: tuple[str, ...] = ()
    """Beginnings of parameter names that are not trained, such as ``"model.model.vision_tower"``."""
    frozen_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type in which weights that are not trained are held, such as those under adapters or of the reference
    of ``dpo``; what is trained is float32. ``bf16`` needs ``run.precision = "bf16"``."""
    quantize: Literal["none", "nf4"] = "none"
    """Weights of linear layers under adapters, of a model of ``model.path``: ``nf4`` holds them in 4 bits
    (QLoRA), by bitsandbytes (``shardflow[qlora]``). Needs ``lora.rank``."""
    language: Literal["gpt2", "llama"] = "gpt2"
    patch_size: Count = 8
    """Pixels on the side of a vision patch; must divide rows and columns of its images."""
    vision_width: Count = 128
    vision_layers: Count = 4
    vision_heads: Count = 4
    language_width: Count = 128
    language_layers: Count = 4
    language_heads: Count = 4
    dropout: Annotated[float, Bounds(0.0, 0.9)] = 0.1
    activation_checkpointing: bool = False
    """Recompute activations in the backward: less memory, about a third more compute."""
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2", "flex_attention"] = "auto"
    """Attention of a model of ``model.path``, as transformers names it; ``auto`` leaves it the choice.
    ``flash_attention_2`` needs its package and half precision."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.arguments and not self.target:
            raise ConfigError("model.arguments needs model.target, which is not set; remove it.")
        for name in ("weights", "quantize", "attn_implementation"):
            if self.path is None and name in changed_settings(self):
                raise ConfigError(f"model.{name} needs model.path, which is not set; remove it.")
        for part in ("vision", "language"):
            width, heads = getattr(self, f"{part}_width"), getattr(self, f"{part}_heads")
            if width % heads or (width // heads) % 2:
                raise ConfigError(
                    f"{part}_width must be an even multiple of {part}_heads ({heads}), got {width}; "
                    f"use {2 * heads * max(1, round(width / (2 * heads)))}."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Adapters of low rank beside frozen weights, by peft; the checkpoints hold the adapters alone."""

    rank: CountOrZero = 0
    """0 trains the model itself."""
    alpha: Annotated[float, Bounds(0.0)] = 16.0
    """Adapters are scaled by ``alpha / rank``."""
    dropout: Annotated[float, Bounds(0.0, 0.9)] = 0.0
    targets: tuple[str, ...] = ()
    """Ends of names of linear layers that get one, such as ``"q_proj"``; none: all of the language blocks."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.rank == 0 and changed_settings(self):
            raise ConfigError(
                f"lora.{changed_settings(self)[0]} needs lora.rank, which is 0; remove it, or set a rank."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Strategy of several ranks; changes memory and traffic, never what is trained."""

    strategy: Literal["ddp", "fsdp2"] = "ddp"
    """``ddp``: every rank holds the whole model. ``fsdp2``: each holds an equal share of every parameter,
    gradient and moment, and gathers a layer at a time; checkpoints load into either."""
    accumulation: Literal["whole", "sharded"] = "whole"
    """Under ``fsdp2``, between the micro-batches of a step: keep whole gradients and exchange once a step, or
    exchange after each one and keep shares."""
    reshard_after_forward: bool = True
    """Under ``fsdp2``, free a layer's gathered parameters after its forward and gather them again in the
    backward: less memory, half as much traffic again."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.strategy == "ddp" and changed_settings(self):
            raise ConfigError(
                "parallel.accumulation and parallel.reshard_after_forward must be left out under ddp, got "
                "one; remove it, or set parallel.strategy to 'fsdp2'."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataLoadingConfig:
    """The loader; no effect on what is trained."""

    execution: Literal["threads", "process", "workers", "service"] = "threads"
    """Where it happens, see docs/howto/execution.md; ``process`` where the loop is busy in Python,
    ``service`` on the data servers."""
    num_threads: Count = 2
    servers: tuple[str, ...] = ()
    """Data servers, ``HOST:PORT`` each or one ``@FILE``, see docs/howto/data-servers.md."""
    server_token_file: str = ""
    """File with the token that they ask for."""
    server_tls_ca: str = ""
    """PEM file of their certificate authority, for TLS."""
    server_timeout_s: Seconds = 30.0
    """Longest wait for a server, after which another one is asked."""
    prefetch_bytes: ByteSize = 256 * 1024**2
    max_node_bytes: ByteSize = 0
    """Cap on the memory of the loaders of all ranks of a node; 0 is that of the machine or its cgroup."""
    pinned_bytes: ByteSize = 256 * 1024**2
    """Pinned memory that micro-batches pass on their way to a GPU; none is taken on CPUs."""
    wait_timeout_s: Seconds = 60.0
    """A wait for data that is longer names its shard and stage and ends the run."""
    on_bad_sample: Literal["mask", "raise"] = "mask"
    max_bad_samples: CountOrZero = 10
    max_bad_share: Annotated[float, Bounds(0.0, 1.0)] = 0.05
    """Share of its samples of an epoch that a rank may mask before the run fails; 8 are tolerated anyway."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_servers(self.servers, self.execution)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeoutConfig:
    """Timeouts between ranks, in seconds."""

    startup_s: Seconds = 600.0
    """Until all ranks have joined and prepared; nothing is exchanged before that."""
    steady_s: Seconds = 100.0
    """For one exchange of gradients once steps are running."""
    control_s: Seconds = 600.0
    """For barriers outside the gradient path: a checkpoint being written, an evaluation ending."""
    hang_s: SecondsOrZero = 60.0
    """A rank that makes no progress in its own work, or shows no sign of its interpreter, for longer is
    named, and ends the run. 0 waits forever, as under a debugger."""
    lost_s: Seconds = 10.0
    """A machine that is silent for longer is considered lost."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.hang_s >= self.steady_s:
            # Else the ranks that wait for the hung one give up first, and nobody names it.
            raise ConfigError(
                f"timeouts.hang_s must be less than timeouts.steady_s ({self.steady_s:g}), got "
                f"{self.hang_s:g}; lower it, or raise timeouts.steady_s."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorConfig:
    """Measurements and exporters of a run, see docs/monitoring.md; no effect on what is trained."""

    interval_s: SecondsOrZero = 5.0
    """An interval ends with the first step after so many seconds, and is a line of ``metrics.jsonl``; the
    first step is one of its own. 0 measures no stages."""

    prometheus: str = ""
    """``ADDRESS:PORT`` where rank 0 serves its numbers to Prometheus during the run, see
    docs/monitoring.md: ``127.0.0.1:9464``; port 0 is any free one, and logged. Empty serves none."""
    prometheus_token_file: str = ""
    """File with the token of scrapers, needed where `prometheus` is an address beyond this machine; empty for
    one of this machine writes a new one to ``scrape.token`` in the run folder; ``none`` serves everybody."""
    first_sample: bool = False
    """Write the first sample of the first step as text, with what its loss counts marked, into
    ``first_sample.txt`` of the run folder, which only its owner may read; of reports and conversations."""
    sinks: tuple[str, ...] = ()
    """Services that get steps, intervals, verdicts and evaluations: ``wandb``, ``mlflow``."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_metrics_address(self.prometheus, self.prometheus_token_file)
        if unknown := [name for name in self.sinks if name not in SINKS]:
            raise ConfigError(
                f"monitor.sinks must name some of {', '.join(SINKS)}, got {unknown[0]!r}; correct it."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneConfig:
    """Online tuner of loader and cache settings; no effect on what is trained."""

    mode: Literal["off", "observe", "on"] = "observe"
    """``observe`` logs what it would change; ``on`` changes it, one setting at a time, see docs/tuning.md."""
    start_from: Path | None = None
    """A ``tuned.toml`` that another run wrote: settings to begin with. A restart begins with its own."""
    settle_steps: Annotated[int, Bounds(50)] = 200
    """A search ends within so many steps."""
    max_threads: CountOrZero = 0
    """Most threads, or processes, of the loader of a rank. For all four: 0 leaves it to the machine."""
    max_fetches: CountOrZero = 0
    """Most reads ahead, and requests to a store, that a rank has under way."""
    max_bytes: ByteSizeOrZero = 0
    """Most memory that each setting of bytes may take in a rank: what is under way, what is read ahead, the
    cache in memory. All of a node together stay within ``loader.max_node_bytes`` as well."""
    max_disk_bytes: ByteSizeOrZero = 0
    """Largest cache folder; 0: at most ``cache.max_bytes``."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The run itself: output folder, length, device, precision."""

    output: Path
    """Run folder; belongs to one run, whose restarts share it."""
    seed: int = 0
    num_epochs: Count | None = None
    """Passes over the training split; one where ``max_steps`` is not set either."""
    max_steps: Count | None = None
    """Steps of the whole run, also inside an epoch. With both, what comes first ends the run; the learning
    rate's cosine ends there too."""
    checkpoint_every_steps: Count = 100
    """A checkpoint is also written at the end and on SIGTERM or SIGUSR1."""
    keep_last: Count = 2
    resume: str = "auto"
    """``auto``: the run folder's newest sound checkpoint, else step 0. ``never``: refuse a run folder that
    holds checkpoints. Or a checkpoint folder to start from where the run folder holds none yet."""
    accept_content_change: bool = False
    """Resume although ``[fields]``, their tables or ``data.transform`` are not those of the checkpoint, for
    example with larger images; the order of samples is the same. It is logged."""
    max_failed_starts: CountOrZero = 3
    """So many starts in a row that end before a next checkpoint are enough: another one is refused, with exit
    code 2. 0 never refuses."""
    evaluate_every_steps: CountOrZero = 0
    """0 evaluates at the end of each epoch; needs ``data.eval_split``."""
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """``npu``: Ascend, by ``torch_npu`` and HCCL. ``auto``: a GPU, else an NPU, else the CPU."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """``bf16``, ``fp16``: compute in it; weights and optimizer stay fp32. ``fp16`` scales the loss."""
    compile: bool = False
    """Compile the model's layers with ``torch.compile``; the first steps take minutes longer."""
    deterministic: bool = False
    """Choose kernels that add in a fixed order where there are such; torch warns of the others."""
    tensorboard: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.resume:
            raise ConfigError(
                "resume must be 'auto', 'never' or a checkpoint folder, got an empty text; use 'auto'."
            )


def default_fields(image: ImageConfig) -> dict[str, Field]:
    """Return the fields of a run that names none: slices of the primary series, and the report."""
    images = Slices(
        series=_FIRST_SERIES,
        num_slices=_NUM_SLICES,
        size=(image.rows, image.columns),
        dtype="float32",
        channels=1,
        missing="pad",
    )
    return {IMAGE_FIELD: images, REPORT_FIELD: Text(missing="pad")}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """All settings of ``shardflow train``."""

    data: DataConfig
    batch: BatchConfig
    run: RunConfig
    task: TaskConfig = field(default_factory=TaskConfig)
    text: TextConfig = field(default_factory=TextConfig)
    fields: FieldTables = field(default_factory=dict)
    """What a batch holds, by name: what the task takes (``image`` and ``report``), and any others. Left out
    for reports: 8 slices of the primary series of each study in the size of the model's images, and the
    report."""
    sampling: Sampling = field(default_factory=Sampling)
    """How often each sample is trained on; left out for a blend, whose components have their own."""
    image: ImageConfig = field(default_factory=ImageConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    augment_volumes: VolumeAugmentConfig = field(default_factory=VolumeAugmentConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loader: DataLoadingConfig = field(default_factory=DataLoadingConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)

    def __post_init__(self) -> None:
        self._keep_folders_apart()
        if self.data.is_blend and self.sampling.is_used:
            raise ConfigError(
                "[sampling] is set although data.dataset is a blend file; write [component.sampling] in it."
            )
        if not self.fields and self.task.has_reports:
            object.__setattr__(self, "fields", default_fields(self.image))
        check_names(self.fields)
        if self.augment_volumes.is_active and (self.task.type != "segment" or self.task.target):
            raise ConfigError("[augment_volumes] has an effect with task.type 'segment' only; remove it.")
        if self.augment_volumes.is_active and self.data.transform:
            raise ConfigError(
                "data.transform makes entries of its own, which [augment_volumes] does not know; leave out "
                "one."
            )
        if self.task.has_reports:
            self._check_reports()
        else:
            self._check_without_reports()
        images = self.fields.get(IMAGE_FIELD)
        if isinstance(images, Slices) and images.augment_pool and self.augment.is_active:
            raise ConfigError(
                "fields.image.augment_pool and [augment] are both set, so a sample would be augmented twice, "
                "beyond what its modality allows; leave out one."
            )
        if self.loader.wait_timeout_s >= self.timeouts.steady_s:
            # Else the ranks that wait in the gradient exchange give up first, and the message names no shard.
            raise ConfigError(
                f"loader.wait_timeout_s must be less than timeouts.steady_s ({self.timeouts.steady_s:g}), "
                f"got {self.loader.wait_timeout_s:g}; lower it, or raise timeouts.steady_s."
            )
        if self.cache.is_on and self.cache.wait_s >= self.loader.wait_timeout_s:
            # A block that another rank fetches must be fetched again before the loader gives up on it.
            raise ConfigError(
                f"cache.wait_s must be less than loader.wait_timeout_s ({self.loader.wait_timeout_s:g}), got "
                f"{self.cache.wait_s:g}; lower it, or raise loader.wait_timeout_s."
            )
        if self.model.frozen_dtype == "bf16" and self.run.precision != "bf16":
            raise ConfigError(
                f"model.frozen_dtype 'bf16' needs run.precision 'bf16', got {self.run.precision!r}; set it, "
                "or remove model.frozen_dtype."
            )
        if self.model.quantize != "none" and not self.lora.rank:
            raise ConfigError("model.quantize needs lora.rank, which is 0; set a rank, or remove it.")
        if self.run.evaluate_every_steps and not self.data.eval_split:
            raise ConfigError("run.evaluate_every_steps needs data.eval_split; name a split, or remove it.")

    @property
    def image_field(self) -> PixelField:
        """The field of the images that the model takes, which are gray but for a classifier of colors."""
        found = self.fields[IMAGE_FIELD]
        assert isinstance(found, PixelField)  # noqa: S101 - checked when the settings were read
        return replace(found, channels=found.channels or 1)

    def _check_reports(self) -> None:
        """Refuse what a model of reports cannot take."""
        if self.text.tokenizer is None:
            raise ConfigError(
                "text.tokenizer is missing, which reports need; make one with shardflow train-tokenizer, or "
                "set task.type."
            )
        if self.model.target:
            raise ConfigError(
                "model.target makes no model of reports; set task.type, or name a folder as model.path."
            )
        check_report_fields(self.fields, needs_text=self.augment.mirror > 0)
        images = self.image_field
        for name in ("rows", "columns"):
            size, patch = getattr(self.image, name), self.model.patch_size
            if size % patch and self.model.path is None:
                raise ConfigError(
                    f"image.{name} must be a multiple of model.patch_size ({patch}), got {size}; "
                    f"use {patch * max(1, round(size / patch))}."
                )
        if self.batch.packed and self.model.path is not None:
            raise ConfigError(
                "batch.packed works with the reference model only, but model.path is set; leave out one."
            )
        sizes = isinstance(images, Slices) and images.sizes
        if self.model.path is not None and (sizes or images.tiles):
            raise ConfigError(
                "sizes and tiles of fields.image do not work with model.path, whose model takes one number "
                "of slices; leave them out."
            )

    def _check_without_reports(self) -> None:
        """Refuse settings that only a task of reports takes: they would have no effect."""
        is_own, is_chat = bool(self.task.target), self.task.has_conversations
        has_images = self.task.type == "classify" and not is_own
        refused = {
            "text": self.text != TextConfig(),
            "lora": not is_chat and self.lora != LoraConfig(),
            "batch.max_tokens": not is_chat and self.batch.max_tokens is not None,
            "batch.packed": not is_chat and self.batch.packed,
            "image": not has_images and self.image != ImageConfig(),
            "augment": not has_images and self.augment.is_active,
            "model.target": is_own and bool(self.model.target),
        }
        model, default = self.model, ModelConfig()
        given = {"path", "weights", "activation_checkpointing", "attn_implementation", "frozen_dtype"}
        of_folder = {*given, "quantize"} if is_chat else set()
        refused["monitor.first_sample"] = not is_chat and self.monitor.first_sample
        refused |= {
            f"model.{one.name}": getattr(model, one.name) != getattr(default, one.name)
            for one in fields(ModelConfig)
            if one.name not in {"target", "arguments", "frozen", *of_folder}
        }
        for name, is_given in refused.items():
            if is_given:
                what = "task.target" if is_own else f"task.type {self.task.type!r}"
                raise ConfigError(f"{name} has no effect with {what}; remove it.")
        if has_images:
            check_classify_fields(self.fields)
        elif is_chat:
            check_conversation_fields(self.fields, self.task, model, changed_settings(self.batch))
            check_stored_reference(self.task, self.data, is_whole=self.data.view == FULL_STUDY)
        elif not is_own:
            self._check_segment()

    def _check_segment(self) -> None:
        """Refuse what a model of volumes cannot take."""
        if self.data.unit != "study" or self.data.view != FULL_STUDY:
            raise ConfigError(
                "task.type 'segment' takes volumes of studies; leave out data.unit and data.view, and select "
                "the series in fields.image."
            )
        if self.data.is_blend and self.data.eval_split:
            raise ConfigError(
                "task.type 'segment' evaluates the volumes of one dataset, and data.dataset is a blend file; "
                "leave out data.eval_split, and evaluate each dataset by a run of its own."
            )
        volume = check_segment_fields(self.fields, self.task, is_evaluated=bool(self.data.eval_split))
        self.augment_volumes.check(volume)

    def _keep_folders_apart(self) -> None:
        """Refuse to write into the dataset, or a run and a cache into one folder."""
        dataset, output, cache = self.data.dataset, self.run.output, self.cache.directory
        # An address has no folders in it.
        for name, folder in (("run.output", output), ("cache.directory", cache)):
            if folder is not None and folder.is_relative_to(dataset):
                raise ConfigError(
                    f"{name} must lie outside data.dataset, got a folder in it; choose a folder of its own."
                )
        if cache is not None and output.is_relative_to(cache):
            raise ConfigError(
                "run.output must lie outside cache.directory, got a folder in it; choose another one for the "
                "cache, on a disk of the node."
            )
