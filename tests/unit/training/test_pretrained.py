"""Models of transformers from a local folder: what they see, what they predict, what they refuse."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardflow.errors import ConfigError, StateError
from shardflow.fields.conversations.rendering import blank_picture
from shardflow.training.checkpoint.files import read_checkpoint
from shardflow.training.config import ImageConfig, TrainConfig
from shardflow.training.metrics import read_metrics
from shardflow.training.models.building import _smallest_inputs, freeze_idle
from shardflow.training.run import TrainSummary, train
from shardflow.training.sequences import weighted_token_loss
from shardflow.training.text import ReportTokenizer
from tests.conversation_case import make_folder
from tests.sweeps import sampled
from tests.tiny_models import TEMPLATE, make_encoder_decoder, make_llava, model_of
from tests.tiny_runs import TinyInput, tiny_config

KINDS = ("llava", "encoder-decoder")


@pytest.fixture(scope="module")
def folders(tiny: TinyInput, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {
        "llava": make_llava(base / "llava", tiny.tokenizer),
        "encoder-decoder": make_encoder_decoder(base / "encoder-decoder", tiny.tokenizer),
    }


def config_of(tiny: TinyInput, output: Path, folder: Path, *overrides: str) -> TrainConfig:
    return tiny_config(
        tiny, output, f"model.path={folder}", f"text.tokenizer={folder}", "run.max_steps=6", *overrides
    )


def build(tiny: TinyInput, folder: Path, *overrides: str) -> tuple[nn.Module, ReportTokenizer]:
    config = config_of(tiny, tiny.folder / "unused", folder, *overrides)
    return model_of(config)


def run(tiny: TinyInput, output: Path, folder: Path, *overrides: str) -> TrainSummary:
    return train(config_of(tiny, output, folder, *overrides))


def newest(output: Path) -> Mapping[str, torch.Tensor]:
    name = (output / "checkpoints" / "latest").read_text().strip()
    return read_checkpoint(output / "checkpoints" / name).model


def arguments(num_slices: int, present: list[list[bool]], tokens: torch.Tensor) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(3)
    images = torch.rand((len(present), 3, 16, 16), generator=generator)[:, :num_slices]
    mask = torch.tensor(present)[:, :num_slices]
    ranges = torch.tensor([[0.0, 1.0]]).expand(len(present), 2)
    return images, mask, ranges, tokens, torch.ones_like(tokens, dtype=torch.bool)


TOKENS = torch.tensor([[1, 40, 41, 42], [1, 50, 51, 52]])


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_trains_stops_and_goes_on_to_the_same_bits(
    tiny: TinyInput, tmp_path: Path, folders: dict[str, Path], kind: str
) -> None:
    summary = run(tiny, tmp_path / "whole", folders[kind], "data.eval_split=val", "run.num_epochs=1")
    losses = [line["loss"] for line in read_metrics(tmp_path / "whole")]
    assert losses[-1] < losses[0]
    assert summary.evaluation_loss is not None
    whole = dict(newest(tmp_path / "whole"))
    shutil.rmtree(tmp_path / "whole" / "checkpoints" / "step-00000006")
    again = run(tiny, tmp_path / "whole", folders[kind], "data.eval_split=val", "run.num_epochs=1")
    assert again.resumed_from == "step-00000004"
    assert all(torch.equal(tensor, whole[name]) for name, tensor in newest(tmp_path / "whole").items())


@pytest.mark.parametrize("kind", KINDS)
def test_padded_slices_change_nothing(tiny: TinyInput, folders: dict[str, Path], kind: str) -> None:
    model, _ = build(tiny, folders[kind], "fields.image.num_slices=3")
    model.eval()
    padded = arguments(3, [[True, True, False], [True, False, False]], TOKENS)
    with torch.no_grad():
        both = model(*padded)
        other = model(padded[0] + (~padded[1])[:, :, None, None] * 0.5, *padded[1:])
        short = model(*arguments(2, [[True, True, False], [True, False, False]], TOKENS))
    assert torch.equal(both, other)
    assert torch.allclose(both, short, atol=1e-5)
    assert torch.isfinite(both).all()


@pytest.mark.parametrize("kind", KINDS)
def test_slices_and_their_order_matter(tiny: TinyInput, folders: dict[str, Path], kind: str) -> None:
    model, _ = build(tiny, folders[kind])
    model.eval()
    given = arguments(3, [[True] * 3] * 2, TOKENS)
    with torch.no_grad():
        first = model(*given)
        second = model(given[0] * 0.5, *given[1:])
    assert (first - second).abs().max() > 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_a_micro_batch_without_images_gives_every_trained_parameter_a_gradient(
    tiny: TinyInput, folders: dict[str, Path], kind: str
) -> None:
    model, _ = build(tiny, folders[kind])
    given = arguments(3, [[False] * 3] * 2, TOKENS)
    loss = weighted_token_loss(model(*given), TOKENS, torch.ones(2))
    torch.autograd.backward(loss)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name
            if "vision_tower" in name or ".encoder." in name:
                assert not parameter.grad.any(), name


def test_rows_begin_where_generation_begins_and_end_with_the_turn(
    tiny: TinyInput, folders: dict[str, Path]
) -> None:
    _, tokenizer = build(tiny, folders["llava"], "text.prompt=What is seen?")
    plain = ReportTokenizer.load(folders["llava"])
    row, bare = (words.encode(["Clear lungs."], 24).token_ids[0].tolist() for words in (tokenizer, plain))
    assert plain.decode([row[0]]) == " "  # the template's last letter before the report
    length = bare.index(plain.end_id) + 1
    assert row[1:length] == bare[1:length]
    assert row[length] == row[0]  # and what it puts behind the end


def test_images_of_gemma_attend_to_all_of_themselves_between_their_marks(
    tiny: TinyInput, tmp_path: Path
) -> None:
    """What stands before a report is what the model's own processor returns for three slices."""
    folder = tmp_path / "gemma3"
    processor = make_folder("gemma3", folder)
    sides = ("image.rows=28", "image.columns=28", "fields.image.size=[28, 28]")
    model, _ = build(tiny, folder, *sides, "text.prompt=What is seen?")
    given: dict[str, torch.Tensor] = {}
    inner: Any = model.model
    inner.register_forward_pre_hook(lambda _, __, named: given.update(named), with_kwargs=True)
    with torch.no_grad():
        ranges = torch.tensor([[0.0, 1.0]])
        tokens = torch.tensor([[40, 41, 42]])
        there = torch.ones((1, 3), dtype=torch.bool)
        model(torch.rand((1, 3, 28, 28)), there, ranges, tokens, torch.ones_like(tokens, dtype=torch.bool))
    pictures = [blank_picture(28, 28)] * 3
    content = [
        *({"type": "image", "image": one} for one in pictures),
        {"type": "text", "text": "What is seen?"},
    ]
    wanted = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    length = wanted["input_ids"].shape[1]
    # The last token of the prompt is the first of a row.
    assert torch.equal(given["input_ids"][:, : length - 1], wanted["input_ids"][:, :-1])
    assert torch.equal(given["token_type_ids"][:, : length - 1], wanted["token_type_ids"][:, :-1])
    assert given["token_type_ids"].shape == given["input_ids"].shape
    assert not given["token_type_ids"][:, length - 1 :].any()


@pytest.mark.parametrize(
    ("family", "what"), [("qwen2_5_vl", "whose images have a size each"), ("llama", "got")]
)
def test_what_reports_cannot_train_is_trained_on_conversations(
    tiny: TinyInput, tmp_path: Path, family: str, what: str
) -> None:
    make_folder(family, tmp_path / family)
    with pytest.raises(ConfigError, match=rf"{what}.*task\.type = 'sft'"):
        build(tiny, tmp_path / family)


def test_a_decoder_without_a_start_token_begins_as_the_tokenizer_does(
    tiny: TinyInput, tmp_path: Path, folders: dict[str, Path]
) -> None:
    folder = shutil.copytree(folders["encoder-decoder"], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["decoder_start_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    _, framed = build(tiny, folder)
    assert framed.begin_id == ReportTokenizer.load(folder).begin_id


def test_the_prompt_stands_before_the_rows(tiny: TinyInput, folders: dict[str, Path]) -> None:
    model, _ = build(tiny, folders["llava"], "text.prompt=What is seen?", "fields.image.num_slices=2")
    before = model.get_buffer("before_N").tolist()
    plain = ReportTokenizer.load(folders["llava"])
    assert "What is seen?" in plain.decode(before)
    assert before.count(plain.vocab_size - 1) == 2 * 4  # the image token, four places a slice
    assert "before_N" not in model.state_dict()


def test_layers_that_no_output_depends_on_are_not_trained(tiny: TinyInput, folders: dict[str, Path]) -> None:
    """CLIP's features come from the layer before the last."""
    model, _ = build(tiny, folders["llava"])
    idle = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert idle
    assert all("layers.2." in name or "post_layernorm" in name for name in idle)


@pytest.mark.parametrize("kind", ["llava", "encoder-decoder"])
@pytest.mark.parametrize("weights", ["stored", "random"])
def test_attention_is_that_of_the_settings(
    tiny: TinyInput, folders: dict[str, Path], kind: str, weights: str
) -> None:
    """The same numbers to rounding, by another implementation."""
    models = {}
    for name in ("eager", "sdpa"):
        settings = (f"model.attn_implementation={name}", f"model.weights={weights}")
        models[name], _ = build(tiny, folders[kind], *settings)
        inner: Any = models[name].model
        assert {inner.config._attn_implementation} == {name}
    inputs = tuple(
        one.expand(2, *one.shape[1:]) for one in _smallest_inputs(ImageConfig(rows=16, columns=16))
    )
    first, second = (model.eval()(*inputs) for model in models.values())
    torch.testing.assert_close(first, second)


def test_attention_that_is_not_installed_is_refused(tiny: TinyInput, folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="attn_implementation 'flash_attention_2' does not work"):
        build(tiny, folders["llava"], "model.attn_implementation=flash_attention_2")
    with pytest.raises(ConfigError, match=r"needs model\.path"):
        tiny_config(tiny, tiny.folder / "run", "model.attn_implementation=eager")


class Steps(nn.Module):
    """A layer for each case; ``reads`` is what its forward asks the values of its input."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.first, self.second, self.idle = (nn.Linear(2, 2) for _ in range(3))
        self._reads = reads

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.first(values)
        if self._reads == "check" and (values > 1).any():
            return torch.tanh(self.second(output))
        if self._reads == "number":
            return output if values.sum().item() > 1 else torch.tanh(self.second(output))
        return output


@pytest.mark.parametrize(
    ("reads", "trained"),
    [("nothing", {"first"}), ("check", {"first", "second"}), ("number", {"first", "second"})],
)
def test_idle_layers_are_found_without_activations(
    monkeypatch: pytest.MonkeyPatch, reads: str, trained: set[str]
) -> None:
    """On the meta device where values decide nothing; either branch of a check counts."""
    model, devices = Steps(reads), []
    inner = torch.nn.functional.linear

    def linear(values: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        devices.append(values.device.type)
        return inner(values, *parameters)

    monkeypatch.setattr("torch.nn.functional.linear", linear)
    freeze_idle(model, (torch.zeros(1, 2),))
    names = {
        name.partition(".")[0] for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    assert names == trained
    assert set(devices) == ({"meta"} if reads != "number" else {"meta", "cpu"})


def test_frozen_parts_stay_and_are_not_in_the_checkpoint(
    tiny: TinyInput, tmp_path: Path, folders: dict[str, Path]
) -> None:
    run(tiny, tmp_path, folders["llava"], 'model.frozen=["model.model.vision_tower"]')
    names = set(newest(tmp_path))
    assert names
    assert not [name for name in names if "vision_tower" in name]


def test_random_weights_follow_from_the_seed(tiny: TinyInput, folders: dict[str, Path]) -> None:
    models = [
        build(tiny, folders["llava"], "model.weights=random", f"run.seed={seed}")[0] for seed in (1, 1, 2)
    ]
    first, same, other = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(tensor, same[name]) for name, tensor in first.items())
    assert any(not torch.equal(tensor, other[name]) for name, tensor in first.items())
    stored, _ = build(tiny, folders["llava"], "run.seed=1")
    assert any(not torch.equal(t, first[name]) for name, t in stored.named_parameters())


@pytest.mark.parametrize(
    ("kind", "strategy"),
    sampled(product(KINDS, ["ddp", "fsdp2"]), {("llava", "fsdp2"), ("encoder-decoder", "ddp")}),
)
def test_half_precision_and_activation_checkpointing(
    tiny: TinyInput, tmp_path: Path, folders: dict[str, Path], kind: str, strategy: str
) -> None:
    settings = ("run.precision=bf16", "model.activation_checkpointing=true", f"parallel.strategy={strategy}")
    run(tiny, tmp_path, folders[kind], *settings, "run.max_steps=2")
    assert len(read_metrics(tmp_path)) == 2


# ---- adapters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sampled([*KINDS, "own"], {"llava", "own"}))
def test_adapters_alone_are_trained_and_kept(
    tiny: TinyInput, tmp_path: Path, folders: dict[str, Path], kind: str
) -> None:
    output = tmp_path / "run"
    settings = ("lora.rank=2", "run.max_steps=4", "lora.dropout=0.1")
    if kind == "own":
        config = tiny_config(tiny, output, *settings)
    else:
        config = config_of(tiny, output, folders[kind], *settings)
    before = {name: p.detach().clone() for name, p in model_of(config)[0].named_parameters()}
    train(config)
    after = newest(output)
    assert after.keys() == {name for name in before if "lora_" in name}
    assert any(not torch.equal(tensor, before[name]) for name, tensor in after.items())
    assert train(config).resumed_from == "step-00000004"


def test_adapters_change_nothing_before_they_are_trained(tiny: TinyInput, folders: dict[str, Path]) -> None:
    given = arguments(3, [[True] * 3] * 2, TOKENS)
    with torch.no_grad():
        plain, adapted = (
            build(tiny, folders["llava"], *extra)[0].eval()(*given) for extra in ((), ("lora.rank=2",))
        )
    assert torch.equal(plain, adapted)


def test_targets_are_ends_of_names(tiny: TinyInput, folders: dict[str, Path]) -> None:
    model, _ = build(
        tiny, folders["llava"], "lora.rank=2", 'lora.targets=["language_model.layers.0.self_attn.q_proj"]'
    )
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(names) == 2
    assert all("layers.0.self_attn.q_proj.lora_" in name for name in names)
    model = build(tiny, folders["llava"], "lora.rank=2", 'lora.targets=["q_proj"]')[0]
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert any("vision" in name for name in trained)
    assert not any("vision" in name and "layers.2." in name for name in trained)  # its features are not taken
    with pytest.raises(ConfigError, match=r"lora\.targets: the name of no"):
        build(tiny, folders["llava"], "lora.rank=2", 'lora.targets=["nothing"]')


def test_peft_is_named_where_it_is_missing(
    tiny: TinyInput, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "peft" else real(name, *rest)
    )
    with pytest.raises(ConfigError, match=r"needs the package peft.*shardflow\[lora\]"):
        build(tiny, folders["llava"], "lora.rank=2")


# ---- what is refused -----------------------------------------------------------------------------


def test_another_folder_prompt_or_rank_is_refused_by_name(
    tiny: TinyInput, tmp_path: Path, folders: dict[str, Path]
) -> None:
    run(tiny, tmp_path, folders["llava"], "run.max_steps=2")
    for overrides, name in (
        (("text.prompt=Something else",), r"text\.prompt"),
        (("lora.rank=2",), r"lora\.rank"),
        (("model.activation_checkpointing=true", 'model.frozen=["model.lm_head"]'), r"model\.frozen"),
    ):
        with pytest.raises(StateError, match=name):
            run(tiny, tmp_path, folders["llava"], *overrides)
    with pytest.raises(StateError, match=r"text\.tokenizer digest|model\.path digest"):
        run(tiny, tmp_path, folders["encoder-decoder"])
    run(tiny, tmp_path / "adapted", folders["llava"], "run.max_steps=2", "lora.rank=2")
    with pytest.raises(StateError, match=r"lora\.rank is None, but checkpoint .* was trained with 2"):
        run(tiny, tmp_path / "adapted", folders["llava"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("image.rows=24",), r"image\.rows and image\.columns must be 16 and 16"),
        (("text.max_tokens=240",), "must fit the 256 positions"),
        (('model.frozen=["nothing"]',), r"model\.frozen: no parameter name begins"),
        (('model.frozen=["model"]',), "leaves nothing to train"),
        (("model.path=missing",), r"model\.path must be a folder"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    tiny: TinyInput, folders: dict[str, Path], overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(tiny, folders["llava"], *overrides)


def test_weights_that_are_not_safetensors_are_refused(
    tiny: TinyInput, tmp_path: Path, folders: dict[str, Path]
) -> None:
    folder = make_llava(tmp_path / "llava", tiny.tokenizer)
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"with safetensors.*got OSError"):
        build(tiny, folder)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (TEMPLATE.replace("{{ c['text'] }}", ""), "pass the assistant's words on"),
        (TEMPLATE.replace("<image>", ""), "one image token for each of 3"),
        ("{{ no_such_function() }}", "can be rendered"),
        (TEMPLATE.replace("{{ bos_token }}", "").replace("{{ m['role'] }}: ", ""), "after some words"),
    ],
)
def test_a_chat_template_that_does_not_fit_is_refused(
    tiny: TinyInput, tmp_path: Path, template: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(tiny, make_llava(tmp_path / "llava", tiny.tokenizer, template=template))
