"""Task of reports: from the images of a study to the words of its report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from shardflow.fields.field import Field
from shardflow.fields.registry import type_name
from shardflow.fields.types.pixel_field import PixelField
from shardflow.loading import Loader, Selection
from shardflow.sampling import BatchSpec
from shardflow.sampling.spec import Tail
from shardflow.training.config import BatchConfig, ImageConfig, LoraConfig, ModelConfig, TextConfig
from shardflow.training.data import batch_spec, open_inputs, run_fields, sample_inputs
from shardflow.training.distributed import Ranks
from shardflow.training.inputs import InputMaker, InputSource, StepInputs
from shardflow.training.model_fields import AugmentConfig, num_places
from shardflow.training.models.building import build_report_model, model_bindings
from shardflow.training.sequences import IGNORED_LABEL
from shardflow.training.tasks.task import Pieces
from shardflow.training.text import ReportTokenizer


@dataclass(kw_only=True, slots=True)
class ReportTask:
    """Task of reports; see `shardflow.training.tasks.task.Task`.

    Args: the tables of the settings.
    """

    tokenizer: ReportTokenizer
    """Frames the reports; the model's own once it is built."""
    images: PixelField
    batch: BatchConfig
    settings: Mapping[str, Field]
    """The tables ``[fields.NAME]``."""
    image: ImageConfig
    text: TextConfig
    augment: AugmentConfig
    model: ModelConfig
    lora: LoraConfig
    seed: int

    def bindings(self) -> dict[str, Any]:
        """Return the settings that must match the tensors of a checkpoint."""
        bindings: dict[str, Any] = {}
        for table in ("model", "image", "augment"):
            for name, value in asdict(getattr(self, table)).items():
                bindings[f"{table}.{name}"] = list(value) if isinstance(value, tuple) else value
        # The loader compares the other fields, which no tensor depends on.
        bindings |= image_bindings(self.images)
        bindings["places of fields.image"] = num_places(self.images)
        # Recomputing activations changes memory, not results; compiling changes time.
        del bindings["model.activation_checkpointing"]
        del bindings["model.attn_implementation"]
        del bindings["image.compile"]
        for name in ("path", "weights", "frozen", "frozen_dtype", "quantize", "target", "arguments"):
            del bindings[f"model.{name}"]
        bindings |= model_bindings(self.model, self.lora)
        if self.model.path is not None:
            bindings["text.prompt"] = self.text.prompt
        bindings["batch.packed"] = self.batch.packed
        bindings["text.max_tokens"] = self.text.max_tokens
        bindings["text.tokenizer digest"] = self.tokenizer.digest
        return bindings

    def batch_spec(self, selection: Selection, tail: Tail | None) -> BatchSpec:
        """Return how steps are formed."""
        fields = self.fields(selection, is_evaluation=tail is not None)
        return batch_spec(self.batch, self.images, self.text, selection, fields, tail=tail)

    def fields(self, selection: Selection, *, is_evaluation: bool) -> dict[str, Field]:
        """Return what a batch holds."""
        return run_fields(self.settings, self.image, self.text.folder, selection, is_evaluation=is_evaluation)

    def make_model(self, loader: Loader, evaluation: Selection | None) -> nn.Module:  # noqa: ARG002
        """Build the model; its tokenizer frames the reports from here on."""
        model, self.tokenizer = build_report_model(
            self.model,
            self.tokenizer,
            image=self.image,
            num_places=num_places(self.images),
            text=self.text,
            lora=self.lora,
            seed=self.seed,
        )
        return model

    def open_inputs(self, loader: Loader, device: torch.device, *, pinned_bytes: int) -> InputMaker:
        """Return the maker of the model's tensors."""
        return open_inputs(
            self.tokenizer,
            device,
            loader.counters,
            fields=loader.fields,
            images=self.images,
            image=self.image,
            text=self.text,
            augment=self.augment,
            packed=self.batch.packed,
            pinned_bytes=pinned_bytes,
            seed=self.seed,
        )

    def padding(self, inputs: InputSource, device: torch.device) -> StepInputs:  # noqa: ARG002
        """Return a micro-batch of weight 0."""
        return sample_inputs(self.images, self.image, self.augment, device, packed=self.batch.packed)

    def evaluation_samples(self, selection: Selection) -> Selection:
        """Return the samples."""
        return selection

    def meter(self, ranks: Ranks) -> None:  # noqa: ARG002
        """Return nothing: an evaluation measures the loss alone."""
        return

    def first_sample(self, loader: Loader) -> Mapping[str, Pieces]:
        """Return the prompt and the report, as its tokens are read back."""
        plain = replace(
            self, batch=replace(self.batch, packed=False), image=replace(self.image, compile=False)
        )
        maker = plain.open_inputs(loader, torch.device("cpu"), pinned_bytes=0)
        with closing(loader.stream(0, range(1))) as batches:
            labels_T = maker(next(batches)).labels_BT[0]  # noqa: N806 - the axes are a suffix
        ids = labels_T[labels_T != IGNORED_LABEL].tolist()
        prompt: Pieces = [] if self.model.path is None else [(f"{self.text.prompt}\n", 0.0)]
        return {"report": [*prompt, (self.tokenizer.decode(ids), 1.0)]}

    @property
    def references(self) -> tuple[()]:
        """Return nothing: the model is run alone."""
        return ()


def image_bindings(images: PixelField) -> dict[str, Any]:
    """Return the settings of the field of images, by name."""
    found = {"type": type_name(type(images)), **asdict(images)}
    return {f"fields.image.{name}": json.loads(json.dumps(value)) for name, value in found.items()}
