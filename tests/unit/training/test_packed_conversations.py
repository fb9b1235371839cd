"""Training on packed conversations: the losses of single ones, and the same run after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from shardflow.errors import ConfigError
from shardflow.format.counts import open_conversation_counts
from shardflow.loading import Loader
from shardflow.loading import select as select_split
from shardflow.loading.sample import open_dataset
from shardflow.training.run import open_task, train
from shardflow.training.tokenizing import count_dataset
from tests.conversation_case import FAMILIES
from tests.distributed.runs import committed_samples, differing_weights
from tests.sweeps import sampled
from tests.unit.training.test_conversations import leave, make_run, settings

PACKED = 'batch={max_tokens = 400, packed = true, micro_batches_per_step = 2, tail = "mask", lanes = 1}'
SINGLE = 'batch={micro_batch_size = 1, micro_batches_per_step = 2, tail = "mask"}'
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
TEXT_CONFIGS: dict[str, Any] = {
    "gemma": transformers.GemmaConfig,
    "gemma2": transformers.Gemma2Config,
    "gemma3_text": transformers.Gemma3TextConfig,
    "mistral": transformers.MistralConfig,
    "qwen3": transformers.Qwen3Config,
}


def packed_run(folder: Path, family: str, task: str = "sft", *, num: int = 24) -> Path:
    """A run whose conversations are counted; text families beside those of images have other models."""
    config = make_run(folder, "qwen2" if family in TEXT_CONFIGS else family, task, num=num)
    if family in TEXT_CONFIGS:
        words = transformers.AutoTokenizer.from_pretrained(str(folder / "model"))
        sliding = {} if family in ("gemma", "qwen3") else {"sliding_window": 24}
        torch.manual_seed(7)
        made = TEXT_CONFIGS[family](vocab_size=len(words), **SMALL, **sliding)
        transformers.AutoModelForCausalLM.from_config(made).save_pretrained(str(folder / "model"))
    elif family == "gemma3":  # also where a layer sees a part of a conversation alone
        made = transformers.AutoConfig.from_pretrained(str(folder / "model"))
        made.text_config.sliding_window = 24
        made.text_config.layer_types = ["sliding_attention", "full_attention"]
        torch.manual_seed(7)
        model = transformers.AutoModelForImageTextToText.from_config(made)
        # Which begins as zeros, so that pictures would not count.
        model.model.multi_modal_projector.mm_input_projection_weight.data.normal_(std=0.3)
        model.save_pretrained(str(folder / "model"))
    count_dataset(open_dataset(folder / "dataset"), folder / "model")
    return config


def losses_of(config: Path, *settings_of_run: str) -> tuple[dict[str, tuple[float, float]], int]:
    """Loss and weight of each sample in float64, and the number of micro-batches with samples."""
    read = settings(config, *settings_of_run)
    task: Any = open_task(read)
    dataset = open_dataset(read.data.dataset)
    fields = task.fields(None, is_evaluation=False)
    spec = task.batch_spec(select(dataset), None)
    with Loader(dataset, split="train", batch=spec, seed=3, fields=fields) as loader:
        model = task.make_model(loader, None).eval().double()
        if getattr(task, "_reference", None) is not None:
            task._reference.double()
            with torch.no_grad():  # else no pair has a margin
                for one in model.parameters():
                    one.add_(torch.sin(torch.arange(one.numel())).reshape(one.shape) * 0.02)
        found: dict[str, tuple[float, float]] = {}
        num_batches = 0
        for batch in loader:
            arrays = task.arrays(batch, is_evaluation=False)
            weights = np.array(batch.info.weight)
            counts = task.counts(arrays, len(weights))
            tensors = {name: torch.from_numpy(np.array(one)) for name, one in arrays.items()}
            tensors = {
                name: one.double() if one.is_floating_point() else one for name, one in tensors.items()
            }
            with torch.no_grad():
                losses = task.losses(task.forward(model, tensors), tensors)
            assert losses.dtype == torch.float64
            num_batches += bool(weights.any())
            for key, loss, count in zip(batch.info.sample_keys, losses.tolist(), counts, strict=True):
                if key is not None:
                    found[key] = (loss, float(count))
    return found, num_batches


def select(dataset: Any) -> Any:
    return select_split(dataset, "train")


def check_equal(config: Path, *settings_of_run: str) -> None:
    packed, num_packed = losses_of(config, PACKED, *settings_of_run)
    single, num_single = losses_of(config, SINGLE, *settings_of_run)
    assert packed.keys() == single.keys()
    assert num_packed < num_single
    for key, (loss, count) in single.items():
        assert packed[key][1] == count
        assert abs(packed[key][0] - loss) <= 1e-6, key
    assert sum(loss for loss, _ in single.values()) > 0


@pytest.mark.parametrize(
    "family", sampled([*FAMILIES, *TEXT_CONFIGS], {"llama", "qwen2_5_vl", "gemma3", "gemma3_text"})
)
def test_packed_losses_are_those_of_single_conversations(family: str, tmp_path: Path) -> None:
    check_equal(packed_run(tmp_path, family))


def split_at(folder: Path, share: float = 0.6) -> tuple[str, str]:
    """Settings of a run whose conversations are split and counted, the longest ones above some tokens."""
    dataset = open_dataset(folder / "dataset")
    (processor,) = (one.name for one in (folder / "dataset" / "conversations").iterdir())
    most = int(np.sort(open_conversation_counts(dataset, processor).tokens[:, 0])[-1] * share)
    assert count_dataset(dataset, folder / "model", split_at=most).num_split > 2
    return f"fields.conversation.max_tokens={most}", "fields.conversation.split_long=true"


@pytest.mark.parametrize("family", sampled(FAMILIES, {"qwen2_5_vl"}))
def test_parts_of_conversations_have_the_same_losses_packed_and_alone(family: str, tmp_path: Path) -> None:
    check_equal(packed_run(tmp_path, family), *split_at(tmp_path), "fields.conversation.long=skip")


@pytest.mark.parametrize(
    ("family", "task"),
    sampled(
        [
            ("qwen2_5_vl", "dpo"),
            ("gemma3", "dpo"),
            ("llama", "reward"),
            ("llava", "reward"),
            ("llama", "score"),
        ],
        {("qwen2_5_vl", "dpo"), ("llama", "reward"), ("llama", "score")},
    ),
)
def test_packed_pairs_have_the_losses_of_single_ones(family: str, task: str, tmp_path: Path) -> None:
    check_equal(packed_run(tmp_path, family, task))


def test_neighboring_pictures_of_two_sequences_stay_apart(tmp_path: Path) -> None:
    """Also where one ends with a picture and the next begins with one, and a layer sees a part alone."""
    config = packed_run(tmp_path, "gemma3", num=8)
    task: Any = open_task(settings(config, PACKED))
    dataset = open_dataset(tmp_path / "dataset")
    spec = task.batch_spec(select(dataset), None)
    with Loader(
        dataset, split="train", batch=spec, seed=3, fields=task.fields(None, is_evaluation=False)
    ) as loader:
        model = task.make_model(loader, None).eval().double()
    picture = model.model.config.image_token_id
    ids = torch.tensor([[9, 10, *[picture] * 4, *[picture] * 4, 11, 12]])
    tokens = {
        "input_ids": ids,
        "position_ids": torch.tensor([[*range(6), *range(6)]]),
        "token_type_ids": (ids == picture).long(),
    }
    segments = torch.tensor([[0] * 6 + [1] * 6])
    pixels = torch.randn((3, 3, 28, 28), dtype=torch.float64)

    def run(second: int, length: int = 12) -> torch.Tensor:
        shown = pixels[[0, second]][: 2 if length == 12 else 1]
        given = {name: one[:, :length] for name, one in tokens.items()}
        with torch.no_grad():
            found: torch.Tensor = model(given, {"pixel_values": shown}, segments=segments[:, :length])
        return found

    torch.testing.assert_close(run(1)[:, :6], run(2)[:, :6], rtol=0, atol=0)
    torch.testing.assert_close(run(1)[:, :6], run(1, length=6), rtol=0, atol=1e-12)
    assert not torch.allclose(run(1)[:, 6:], run(2)[:, 6:])
    # Within a sequence a picture sees itself in both directions.
    single = transformers.AutoModelForImageTextToText.from_pretrained(
        str(tmp_path / "model"), dtype=torch.float64
    ).eval()
    with torch.no_grad():
        wanted = single(
            ids[:, :6], pixel_values=pixels[:1], token_type_ids=tokens["token_type_ids"][:, :6]
        ).logits
    torch.testing.assert_close(run(1)[:, :6], wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "is_split"),
    sampled([("llama", True), ("llama", False), ("qwen2_5_vl", True)], {("llama", True)}),
)
def test_a_stopped_packed_run_goes_on_as_if_nothing_had_been(
    family: str, is_split: bool, tmp_path: Path
) -> None:
    config = packed_run(tmp_path, family, num=40)
    given = (PACKED, *split_at(tmp_path), "fields.conversation.long=skip") if is_split else (PACKED,)
    whole = train(settings(config, *given))
    assert whole.outcome == "finished"
    assert whole.evaluation_scores.keys() == {"token_accuracy"}
    leave()
    other = tmp_path / "other"
    train(settings(config, *given, f"run.output={other}", "run.max_steps=2"))
    leave()
    again = train(settings(config, *given, f"run.output={other}"))
    assert again.resumed_from == "step-00000002"
    assert committed_samples(other) == committed_samples(tmp_path / "run")
    assert differing_weights(other, tmp_path / "run") == []


def test_settings_that_cannot_pack_are_refused(tmp_path: Path) -> None:
    config = packed_run(tmp_path, "gemma3", num=8)
    with pytest.raises(ConfigError, match=r"batch\.over_budget has no effect"):
        settings(config, 'batch={max_tokens = 9, over_budget = "skip", micro_batches_per_step = 2}')
    with pytest.raises(ConfigError, match=r"whose length is missing; set batch\.max_tokens"):
        settings(config, "batch={micro_batch_size = 2, packed = true, micro_batches_per_step = 2}")
    with pytest.raises(ConfigError, match=r"packed follows batch\.packed"):
        settings(config, PACKED, "fields.conversation.packed=true")
    with pytest.raises(ConfigError, match=r"takes no masks, by which the pictures"):
        losses_of(config, PACKED, "model.attn_implementation=flex_attention")
