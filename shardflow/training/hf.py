"""Trainer of transformers over a loader: no second sharding, exact resume, evaluations that count once.

Needs the packages transformers and accelerate (``shardflow[hf]``). A checkpoint of the Trainer holds the
loader's position beside what the Trainer saves, so a resume continues with the next sample; nothing is
skipped through, whatever ``ignore_data_skip`` says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from shardflow.errors import ConfigError, StateError, os_reason
from shardflow.loading import Loader
from shardflow.training.frameworks import (
    Convert,
    EvaluationBatches,
    TrainingBatches,
    check_accelerator,
    check_accumulation,
)

_POSITION: Final = "shardflow.json"
_IGNORED: Final = -100
"""Label of what a loss leaves out, everywhere in transformers."""


class LoaderTrainer(Trainer):
    """Trainer whose training and evaluation batches come from loaders.

    The arguments are those of ``transformers.Trainer``. ``num_train_epochs`` counts epochs of the loader;
    with a token budget, whose epochs differ in length, ``max_steps`` must be set.

    ``eval_loss`` is the mean over everything that is labeled, over all ranks: each batch counts by its labels
    that are not -100, or by its samples where the inputs have no labels. A padding slot must have labels of
    -100, in training too.

    Args:
        train_dataset: The training loader. Its rank is the process's, and ``gradient_accumulation_steps`` is
            its ``num_micro_batches_per_rank``.
        eval_dataset: The evaluation loader, or loaders by name, each with ``tail="mask"``.
        data_collator: Makes the model's keyword arguments from a `shardflow.loading.Batch`, such as
            ``lambda batch: {"pixel_values": batch.torch()["image"].float(), "labels": ...}``.
        **arguments: The rest.

    Raises:
        ConfigError: There is no ``data_collator``; or the settings distribute batches again, or step after
            another number of micro-batches than the plan.

    Example::

        arguments = TrainingArguments(
            "run", gradient_accumulation_steps=loader.num_micro_batches_per_rank, save_steps=100
        )
        trainer = LoaderTrainer(model, arguments, train_dataset=loader, data_collator=to_inputs)
        trainer.train(resume_from_checkpoint=True)
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Convert | None = None,
        train_dataset: Loader | None = None,
        eval_dataset: Loader | Mapping[str, Loader] | None = None,
        **arguments: Any,
    ) -> None:
        if data_collator is None:
            raise ConfigError(
                "LoaderTrainer() needs data_collator=, a function that makes the model's keyword arguments "
                "from a batch."
            )
        given = {"train_dataset": train_dataset, "eval_dataset": eval_dataset, "data_collator": data_collator}
        super().__init__(model=model, args=args, **self._shown(given), **arguments)
        for name, one in given.items():
            setattr(self, name, one)
        self._check(train_dataset)
        self.args.ignore_data_skip = True  # the loader goes to its position by itself
        self._loss: torch.Tensor | None = None
        self._read_from: str | None = None
        if train_dataset is not None:
            self.add_callback(_Position(train_dataset))

    def _shown(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what the class of the framework is made with, in place of loaders and collator."""
        return given

    def _check(self, train_loader: Loader | None) -> None:
        if train_loader is not None:
            check_accelerator(self.accelerator, train_loader)
            check_accumulation(
                train_loader, "gradient_accumulation_steps", self.args.gradient_accumulation_steps
            )
        if self.args.n_gpu > 1:
            raise ConfigError(
                f"The Trainer would split each batch over {self.args.n_gpu} GPUs of this process; start one "
                "process per GPU with torchrun."
            )
        if self.args.auto_find_batch_size:
            raise ConfigError("auto_find_batch_size cannot change the batches of a plan; leave it out.")

    # ---- batches ---------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Return the batches as they are: no sampler and no sharding, the plan has done both."""
        if self.train_dataset is None:
            raise ConfigError("LoaderTrainer.train() needs train_dataset=, the training loader.")
        return TrainingBatches(self.train_dataset, self.data_collator)

    def get_eval_dataloader(self, eval_dataset: Loader | str | None = None) -> Any:
        """Return the batches of an evaluation loader, of one by name, or of the only one.

        Raises:
            ConfigError: There is none, its tail is not ``mask``, or it is of another rank.
        """
        found = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(found, str):
            found = self.eval_dataset[found]
        if not isinstance(found, Loader):
            raise ConfigError("an evaluation needs a loader: pass eval_dataset=sf.Loader(...).")
        check_accelerator(self.accelerator, found)
        return EvaluationBatches(found, self.data_collator)

    def get_test_dataloader(self, test_dataset: Loader) -> Any:
        """Return the batches of a loader for ``predict``; padding slots are among its predictions."""
        return self.get_eval_dataloader(test_dataset)

    def num_examples(self, dataloader: Any) -> int:
        """Return the number of samples of an epoch."""
        number: int = dataloader.loader.plan.num_samples
        return number

    # ---- resume ----------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **arguments: Any) -> Any:
        """Train; with a checkpoint, from the position of the loader when it was saved.

        Raises:
            StateError: The checkpoint has no position of a loader, or one of another run.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
        if isinstance(resume_from_checkpoint, str) and self.train_dataset is not None:
            path = Path(resume_from_checkpoint) / _POSITION
            try:
                state = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise StateError(
                    f"{path} with the position of the loader cannot be read ({os_reason(error)}); resume "
                    "from a checkpoint that LoaderTrainer saved completely."
                ) from None
            self.train_dataset.load_state_dict(state)
        return super().train(resume_from_checkpoint, **arguments)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._read_from = resume_from_checkpoint
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._read_from = None

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Read weights by the names that transformers saves them under; the Trainer knows the model's alone.

        Raises:
            StateError: The checkpoint is of another model.
        """
        if not load_result.unexpected_keys:
            super()._issue_warnings_after_load(load_result)
            return
        model: Any = self.accelerator.unwrap_model(self.model)
        lacking: Any = load_result.unexpected_keys
        if hasattr(model, "from_pretrained"):
            folder = self._read_from or self.state.best_model_checkpoint
            settings = {"config": model.config, "dtype": model.dtype, "local_files_only": True}
            read, found = type(model).from_pretrained(folder, output_loading_info=True, **settings)
            lacking = [*found["missing_keys"], *found["unexpected_keys"]]
            model.load_state_dict(read.state_dict())
        if lacking:
            raise StateError(
                f"The checkpoint holds other weights than the model has, {min(lacking)} among them; resume "
                "with the model that it was saved of."
            )

    # ---- evaluation ------------------------------------------------------------------------------

    def evaluation_loop(
        self, dataloader: Any, description: str, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> Any:
        """Evaluate; the loss is a mean over labels, not over batches of unequal size."""
        self._loss = torch.zeros(2, dtype=torch.float64)
        output = super().evaluation_loop(
            dataloader, description, *args, metric_key_prefix=metric_key_prefix, **kwargs
        )
        sums, self._loss = self._loss.float().to(self.args.device), None
        loss, number = self.accelerator.reduce(sums, "sum").tolist()
        if f"{metric_key_prefix}_loss" in output.metrics:
            output.metrics[f"{metric_key_prefix}_loss"] = loss / max(number, 1)
        return output

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Add what the batch's loss is a mean over, and return what the Trainer returns."""
        found = super().prediction_step(model, inputs, *args, **kwargs)
        if self._loss is not None and found[0] is not None:
            number = self._num_labeled(inputs)
            if number:  # the loss of nothing is no number
                self._loss += torch.tensor([float(found[0]) * number, number], dtype=torch.float64)
        return found

    def _num_labeled(self, inputs: Mapping[str, Any]) -> float:
        """Return what a rank's loss is a mean over; the Trainer may divide it by that of all ranks."""
        number = self._get_num_items_in_batch([inputs], self.args.device)
        if number is not None:
            is_of_all = self.args.average_tokens_across_devices
            return float(number) / (self.args.world_size if is_of_all else 1)
        labels = inputs.get("labels")
        if labels is not None:
            return float((labels != _IGNORED).sum())
        return float(len(next(iter(inputs.values()))))


class _Position(TrainerCallback):
    """Puts the loader's position into every checkpoint, and the right epoch into the log of a resumed run.

    The position is equal on all ranks. An epoch that was resumed inside counts from there in the Trainer.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        position = self._loader.position
        state.epoch = position.epoch + position.step / self._loader.num_steps_in(position.epoch)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if args.should_save:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            (folder / _POSITION).write_text(json.dumps(self._loader.state_dict()), encoding="utf-8")
