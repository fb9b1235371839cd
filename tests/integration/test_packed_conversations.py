"""Packed conversations: counted beside a dataset, planned into sequences, and equal to single ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import shardflow as sf
from shardflow.errors import ConfigError
from shardflow.fields.conversations.rendering import Renderer
from shardflow.fields.conversations.stored import StoredConversation
from shardflow.format.checks.verification import verify
from shardflow.format.counts import counts_folder, counts_name, open_conversation_counts
from shardflow.loading.config import World
from shardflow.sampling import CostRule
from shardflow.training.tokenizing import count_dataset
from tests.conversation_case import FAMILIES, generate, make_folder, write_conversations
from tests.sweeps import sampled

ALONE = sf.BatchSpec(micro_batch_size=1, micro_batches_per_step=1)
BUDGET = sf.TokenBudget(max_tokens=400, max_samples=16, padded=False)


def case(
    family: str, tmp_path: Path, num: int = 40, *, pairs: bool = False, counted: bool = True
) -> tuple[Path, Path]:
    """A processor's folder, and a dataset whose conversations are counted."""
    folder = tmp_path / family
    make_folder(family, folder, with_model=False)
    most = 0 if family in ("llama", "qwen2") else 2
    dataset = write_conversations(tmp_path / "dataset", generate(num, 31, max_images=most, pairs=pairs))
    if counted:
        count_dataset(sf.open(dataset), folder)
    return folder, dataset


def loader(
    dataset: Path,
    folder: Path,
    *,
    budget: sf.TokenBudget | None = BUDGET,
    per_step: int = 4,
    world: Any = None,
    config: sf.LoaderConfig | None = None,
    **settings: Any,
) -> sf.Loader:
    spec = ALONE
    if budget is not None:
        spec = sf.BatchSpec(budget=budget, micro_batches_per_step=per_step, lanes=1, tail="mask")
        settings = {"packed": not budget.padded, **settings}
    field = sf.Conversation(processor=str(folder), **{"max_tokens": 400, **settings})
    return sf.Loader(
        sf.open(dataset),
        split="train",
        seed=3,
        batch=spec,
        fields={"chat": field},
        world=world,
        config=config,
    )


def copied(batch: Any) -> dict[str, Any]:
    return {name: np.array(value) for name, value in batch.items()}


def alone(dataset: Path, folder: Path, **settings: Any) -> dict[str, Mapping[str, Any]]:
    """Each conversation in a batch of its own, by key."""
    with loader(dataset, folder, budget=None, **settings) as one:
        return {str(batch.info.sample_keys[0]): copied(batch) for batch in one}


def positions_of_model(folder: Path, one: Mapping[str, Any]) -> Any:
    """Positions of a single conversation, as the model of transformers finds them."""
    words = transformers.AutoTokenizer.from_pretrained(str(folder))
    config = transformers.Qwen2_5_VLConfig(
        image_token_id=words.convert_tokens_to_ids("<|image_pad|>"), vision_config={"depth": 1}
    )
    with torch.device("meta"):
        model = transformers.Qwen2_5_VLModel(config)
    grid = torch.from_numpy(one["chat_image_grid_thw"])
    found, _ = model.get_rope_index(
        torch.from_numpy(one["chat"]),
        torch.from_numpy(one["chat_mm_token_type_ids"]),
        image_grid_thw=grid if len(grid) else None,
    )
    return found[:, 0].numpy()


@pytest.mark.parametrize("family", sampled(FAMILIES, {"llama", "qwen2_5_vl"}))
def test_a_sequence_holds_each_conversation_as_it_is_alone(family: str, tmp_path: Path) -> None:
    folder, dataset = case(family, tmp_path)
    single = alone(dataset, folder)
    seen: list[str] = []
    with loader(dataset, folder) as packed:
        for batch in packed:
            keys = [key for key in batch.info.sample_keys if key is not None]
            cuts = batch["chat_cu_seqlens"]
            assert cuts.dtype == np.int32
            if not keys:
                assert (batch["chat"].shape, batch["chat_weights"].sum()) == ((1, 1), 0)
                continue
            seen += keys
            assert len(cuts) == len(keys) + 1
            assert batch["chat"].shape == (1, cuts[-1])
            for number, key in enumerate(keys):
                here, one = slice(cuts[number], cuts[number + 1]), single[key]
                length = one["chat"].shape[1]
                np.testing.assert_array_equal(batch["chat"][0, here], one["chat"][0])
                weights = one["chat_weights"][0].copy()
                weights[0] = 0
                np.testing.assert_array_equal(batch["chat_weights"][0, here], weights)
                labels = np.where(weights > 0, one["chat"][0], -100)
                np.testing.assert_array_equal(batch["chat_labels"][0, here], labels)
                assert (batch["chat_segment_ids"][0, here] == number).all()
                positions = batch["chat_position_ids"][..., here]
                np.testing.assert_array_equal(positions.reshape(-1, length)[0], np.arange(length))
                if family == "qwen2_5_vl":
                    np.testing.assert_array_equal(positions[1:, 0], positions_of_model(folder, one))
                for name in one.keys() & {"chat_token_type_ids", "chat_mm_token_type_ids"}:
                    np.testing.assert_array_equal(batch[name][0, here], one[name][0])
                for name in one.keys() & {"chat_pixel_values", "chat_image_grid_thw"}:
                    first, stop = batch[f"{name}_offsets"][number : number + 2]
                    np.testing.assert_array_equal(batch[name][first:stop], one[name])
    assert sorted(seen) == sorted(single)


@pytest.mark.parametrize("is_split", [False, True])
def test_ranks_and_a_resume_make_the_same_steps(is_split: bool, tmp_path: Path) -> None:
    given: dict[str, Any] = {}
    if is_split:
        folder, dataset, most, _ = split_case("llama", tmp_path, 60)
        given = {"max_tokens": most, "split_long": True}
        count_dataset(sf.open(dataset), folder, split_at=most)
    else:
        folder, dataset = case("qwen2_5_vl", tmp_path, 60)

    def steps(world_size: int) -> dict[tuple[int, int], dict[str, Any]]:
        found: dict[tuple[int, int], dict[str, Any]] = {}
        for rank in range(world_size):
            world = World(rank=rank, world_size=world_size)
            with loader(dataset, folder, world=world, **given) as one:
                batches = [(batch.info.step, batch.info.micro_batch, copied(batch)) for batch in one]
                assert len(batches) == len(one)
            found |= {(step, micro): batch for step, micro, batch in batches}
        return found

    whole = steps(1)
    assert max(step for step, _ in whole) >= 2
    for world_size in (2, 4):
        other = steps(world_size)
        assert other.keys() == whole.keys()
        for place, batch in whole.items():
            for name, value in batch.items():
                np.testing.assert_array_equal(other[place][name], value)
    with loader(dataset, folder, **given) as one:
        batches = iter(one)
        for _ in range(4):
            next(batches)
        state = json.loads(json.dumps(one.state_dict()))
        assert len(json.dumps(state)) < 1024
    with loader(dataset, folder, world=World(rank=1, world_size=2), **given) as again:
        again.load_state_dict(state)
        first = next(iter(again))
        np.testing.assert_array_equal(first["chat"], whole[first.info.step, first.info.micro_batch]["chat"])
        assert first.info.step == 1


def test_a_bad_conversation_is_padding_of_its_length(tmp_path: Path) -> None:
    folder, dataset = case("qwen2_5_vl", tmp_path, 30)
    with loader(dataset, folder) as one:
        batch = next(iter(one))
        key = batch.info.sample_keys[1]
        whole = copied(batch)
    shard = next(
        path for path in dataset.rglob("*.tar") if f"{key}.conversation.json".encode() in path.read_bytes()
    )
    content = bytearray(shard.read_bytes())
    at = content.index(b'"format_version"', content.index(f"{key}.conversation.json".encode()))
    content[at] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(content)
    config = sf.LoaderConfig(max_bad_share=1.0)
    with loader(dataset, folder, config=config) as one:
        batch = next(iter(one))
        assert [row.key for row in batch.quarantined] == [key]
        here = whole["chat_segment_ids"][0] == 1
        np.testing.assert_array_equal(batch["chat_cu_seqlens"], whole["chat_cu_seqlens"])
        np.testing.assert_array_equal(batch["chat_position_ids"][0], whole["chat_position_ids"][0])
        np.testing.assert_array_equal(batch["chat"][0, ~here], whole["chat"][0, ~here])
        assert {*batch["chat"][0, here]} == {Renderer.load(folder).pad_id}
        assert not batch["chat_weights"][0, here].any()
        assert not batch["chat_mask"][0, here].any()
        first, stop = whole["chat_pixel_values_offsets"][1:3]
        kept = np.delete(whole["chat_pixel_values"], np.s_[first:stop], axis=0)
        np.testing.assert_array_equal(batch["chat_pixel_values"], kept)
        assert batch.info.weight[1] == 0


def test_long_conversations_are_refused_or_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, dataset = case("llama", tmp_path)
    single = alone(dataset, folder)
    lengths = {key: one["chat"].shape[1] for key, one in single.items()}
    most = sorted(lengths.values())[30]
    num_long = sum(length > most for length in lengths.values())
    with pytest.raises(ConfigError, match=rf'{num_long} of 40 conversations are longer.*long = "skip"'):
        loader(dataset, folder, max_tokens=most)
    with caplog.at_level("INFO"), loader(dataset, folder, max_tokens=most, long="skip") as kept:
        found = {key for batch in kept for key in batch.info.sample_keys if key is not None}
    assert found == {key for key, length in lengths.items() if length <= most}
    assert f"field 'chat' leaves out {num_long} conversations that are too long" in caplog.text


def split_case(family: str, tmp_path: Path, num: int = 24) -> tuple[Path, Path, int, dict[str, list[Any]]]:
    """A case as of `case`, the tokens of its longest turn, and the parts of each conversation as rendered."""
    folder, dataset = case(family, tmp_path, num, counted=False)
    renderer = Renderer.load(folder)
    found = generate(num, 31, max_images=0 if family in ("llama", "qwen2") else 2)

    def rendered(turns: list[Any], told: list[Any], pictures: list[Any]) -> Any:
        messages = [*told, *(message for turn in turns for message in turn)]
        shown = [one.convert("RGB") for one in pictures]
        return renderer.render(messages, shown, train_on=("assistant",))

    chats = {}
    for number, (document, pictures) in enumerate(found):
        messages = document["messages"]
        told = [one for one in messages if one["role"] == "system"]
        turns = [messages[at : at + 2] for at in range(len(told), len(messages), 2)]
        chats[f"talk{number:04d}"] = turns, told, pictures
    most = max(len(rendered([turn], *rest).ids) for turns, *rest in chats.values() for turn in turns)
    parts: dict[str, list[Any]] = {}
    for key, (turns, *rest) in chats.items():
        own: list[list[Any]] = []
        for turn in turns:
            if own and len(rendered([*own[-1], turn], *rest).ids) <= most:
                own[-1].append(turn)
            else:
                own.append([turn])
        parts[key] = [rendered(one, *rest) for one in own]
    assert 2 < sum(len(one) > 1 for one in parts.values()) < num
    return folder, dataset, most, parts


def check_parts(batches: Any, parts: Mapping[str, list[Any]]) -> list[str]:
    """Compare the parts of packed batches with what the processor makes of their turns; return their keys."""
    seen = []
    for batch in batches:
        cuts = batch["chat_cu_seqlens"]
        for number, key in enumerate(filter(None, batch.info.sample_keys)):
            talk, _, place = key.rpartition("p")
            one, here = parts[talk][int(place)], slice(cuts[number], cuts[number + 1])
            np.testing.assert_array_equal(batch["chat"][0, here], one.ids)
            weights = one.weights.copy()
            weights[0] = 0
            np.testing.assert_array_equal(batch["chat_weights"][0, here], weights)
            for name, value in one.pictures.items():
                first, stop = batch[f"chat_{name}_offsets"][number : number + 2]
                np.testing.assert_array_equal(batch[f"chat_{name}"][first:stop], value)
            assert (batch.info.units[number].study_key, batch.info.units[number].part) == (talk, int(place))
            seen.append(key)
    return seen


@pytest.mark.parametrize("family", sampled(FAMILIES, {"llama", "qwen2_5_vl"}))
def test_long_conversations_are_split_at_their_turns(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, dataset, most, parts = split_case(family, tmp_path)
    every = [f"{key}p{place}" for key, own in parts.items() for place in range(len(own))]
    with pytest.raises(ConfigError, match=rf"parts of up to {most} tokens .* --max-tokens {most}$"):
        loader(dataset, folder, max_tokens=most, split_long=True)
    done = count_dataset(sf.open(dataset), folder, split_at=most)
    num_split = sum(len(own) > 1 for own in parts.values())
    num_parts = sum(len(own) for own in parts.values() if len(own) > 1)
    assert (done.num_samples, done.num_split, done.num_parts) == (len(parts), num_split, num_parts)
    assert verify(str(dataset)).is_whole
    with caplog.at_level("INFO"), loader(dataset, folder, max_tokens=most, split_long=True) as one:
        assert sorted(check_parts(one, parts)) == sorted(every)
    assert f"splits {num_split} of {len(parts)} conversations into {num_parts} parts" in caplog.text
    # One turn that is too long is a long conversation, as `long` says.
    count_dataset(sf.open(dataset), folder, split_at=most - 1)
    fewer: dict[str, Any] = {"max_tokens": most - 1, "split_long": True}
    with pytest.raises(ConfigError, match=r"\d of \d+ parts of conversations are longer"):
        loader(dataset, folder, **fewer)
    with loader(dataset, folder, long="skip", **fewer) as kept:
        lengths = [length for batch in kept for length in np.diff(batch["chat_cu_seqlens"])]
    assert max(lengths) < most
    # Those of an earlier version of the dataset are kept.
    digest = counts_name(Renderer.load(folder).digest, most)
    place = dataset / counts_folder(digest, sf.open(dataset).dataset_id)
    place.rename(place.parent / ("f" * 64))
    again = count_dataset(sf.open(dataset), folder, split_at=most)
    assert again.num_shards_kept == again.num_shards
    assert (again.num_split, again.num_parts) == (num_split, num_parts)


def test_parts_of_conversations_are_selected_blended_and_looked_at(tmp_path: Path) -> None:
    folder, dataset, most, parts = split_case("llama", tmp_path)
    count_dataset(sf.open(dataset), folder, split_at=most)
    fields = {"chat": sf.Conversation(processor=str(folder), max_tokens=most, packed=True, split_long=True)}
    spec = sf.BatchSpec(
        budget=replace(BUDGET, max_tokens=most), micro_batches_per_step=2, lanes=1, tail="mask"
    )
    wanted = sorted(parts)[1::2]
    (tmp_path / "keys.txt").write_text("\n".join(wanted), encoding="utf-8")
    listed = sf.Loader(
        sf.open(dataset),
        split="train",
        seed=3,
        batch=spec,
        fields=fields,
        keys=tmp_path / "keys.txt",
    )
    with listed:
        seen = check_parts(listed, parts)
    assert sorted(seen) == sorted(f"{key}p{place}" for key in wanted for place in range(len(parts[key])))
    component = f'[[component]]\ndataset = "{dataset}"\nsplit = "train"\n'
    blend = tmp_path / "blend.toml"
    blend.write_text(f"{component}repeat = 2.0\n{component}keys = 'keys.txt'\n", encoding="utf-8")
    every = [f"{key}p{place}" for key, own in parts.items() for place in range(len(own))]
    with sf.Loader(sf.blend(blend), seed=3, batch=spec, fields=fields) as mixed:
        assert sorted(check_parts(mixed, parts)) == sorted([*every, *every, *seen])
        state = json.loads(json.dumps(mixed.state_dict()))
    with sf.Loader(sf.blend(blend), seed=3, batch=spec, fields=fields) as again:
        again.load_state_dict(state)
    key = max(parts, key=lambda one: len(parts[one]))
    whole = sf.open(dataset).sample(key, {"chat": replace(fields["chat"], max_tokens=400, packed=False)})
    assert len(whole["chat"]) > most
    for settings in ({"pairs": True}, {"member": "other.json"}):
        with pytest.raises(ConfigError, match="split_long splits single conversations"):
            replace(fields["chat"], **settings)
    with pytest.raises(ConfigError, match="both have split_long"):
        sf.Loader(
            sf.open(dataset), split="train", seed=3, batch=ALONE, fields=fields | {"two": fields["chat"]}
        )


def test_what_every_part_repeats_is_learned_once(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    make_folder("llama", folder, with_model=False)
    renderer, roles = Renderer.load(folder), ("system", "assistant")
    found = [one for one, _ in generate(40, 31, max_images=0)]
    document = next(
        one for one in found if one["messages"][0]["role"] == "system" and len(one["messages"]) > 3
    )
    stored = StoredConversation.parse(document)
    spans = (0, 3), (3, len(document["messages"]))
    parts = [stored.part(span).render(renderer, {}, train_on=roles)[0] for span in spans]
    told = "You read images."
    assert [told in renderer.tokenizer.decode(one.ids) for one in parts] == [True, True]
    assert [told in renderer.tokenizer.decode(one.ids[one.weights > 0]) for one in parts] == [True, False]


def test_padded_budgets_charge_for_the_longest_of_a_rectangle(tmp_path: Path) -> None:
    folder, dataset = case("llama", tmp_path)
    num_seen = 0
    with loader(dataset, folder, budget=sf.TokenBudget(max_tokens=400, max_samples=16)) as one:
        for batch in one:
            num_seen += int((batch.info.weight > 0).sum())
            assert batch["chat"].size <= 400
    assert num_seen == 40


def test_a_pair_costs_both_sequences(tmp_path: Path) -> None:
    folder, dataset = case("qwen2_5_vl", tmp_path, 24, pairs=True)
    single = alone(dataset, folder, pairs=True)
    num_seen = 0
    with loader(dataset, folder, pairs=True) as one:
        for batch in one:
            cuts = batch["chat_cu_seqlens"]
            assert cuts[-1] <= 400
            for slot, key in enumerate(filter(None, batch.info.sample_keys)):
                num_seen += 1
                for end in range(2):
                    number = 2 * slot + end
                    row = batch["chat"][0, cuts[number] : cuts[number + 1]]
                    own = single[key]
                    wanted = own["chat"][0, end][own["chat_mask"][0, end] > 0]
                    np.testing.assert_array_equal(row, wanted)
                    assert (batch["chat_segment_ids"][0, cuts[number] : cuts[number + 1]] == number).all()
    assert num_seen == 24
    with pytest.raises(ConfigError, match=r"24 of 24 conversations are preference pairs; set pairs"):
        loader(dataset, folder)


def test_counting_resumes_and_keeps_what_another_version_has(tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def stop(done: int, _of: int) -> None:
        if done == 3:
            raise StopError

    folder, dataset = case("qwen2_5_vl", tmp_path, counted=False)
    with pytest.raises(StopError):
        count_dataset(sf.open(dataset), folder, on_shard=stop)
    with pytest.raises(ConfigError, match=r"run: shardflow tokenize DATASET --processor DIR"):
        loader(dataset, folder)
    digest = Renderer.load(folder).digest
    place = dataset / counts_folder(digest, sf.open(dataset).dataset_id)
    torn = place / "part-000001.tbl"
    torn.chmod(0o644)
    torn.write_bytes(torn.read_bytes()[:-3])
    done = count_dataset(sf.open(dataset), folder)
    assert (done.num_shards, done.num_shards_kept, done.num_samples) == (5, 2, 40)
    assert sorted(path.name for path in place.iterdir()) == ["counts.tbl", "manifest.json"]
    assert count_dataset(sf.open(dataset), folder).num_shards_kept == 5
    counts = open_conversation_counts(sf.open(dataset), digest)
    single = alone(dataset, folder)
    for row, key in enumerate(sorted(single)):
        one = single[key]
        assert counts.tokens[row].tolist() == [one["chat"].shape[1], 0]
        assert counts.images[row, 0] == len(one["chat_image_grid_thw"])
        assert counts.rows["pixel_values"][row, 0] == len(one["chat_pixel_values"])
    assert verify(str(dataset)).is_whole
    # The same shards under another manifest, as after an append.
    other = place.parent / ("f" * 64)
    place.rename(other)
    assert count_dataset(sf.open(dataset), folder).num_shards_kept == 5


def test_another_way_to_render_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, dataset = case("llama", tmp_path, 12)
    real = Renderer.call

    def longer(self: Renderer, text: str, pictures: Any) -> dict[str, Any]:
        return real(self, text + "x", pictures)

    monkeypatch.setattr(Renderer, "call", longer)
    with pytest.raises(ConfigError, match=r"12 of 12 conversations have other numbers of tokens"):
        loader(dataset, folder)


def test_budgets_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder, dataset = case("llama", tmp_path, 8)
    with pytest.raises(ConfigError, match=r"'chat' is packed, which needs a token budget"):
        loader(dataset, folder, budget=sf.TokenBudget(max_tokens=400, max_samples=4), packed=True)
    with pytest.raises(ConfigError, match=r"'chat' is not packed; write packed=True"):
        loader(dataset, folder, packed=False)
    cut = sf.TokenBudget(max_tokens=400, max_samples=4, padded=False, over_budget="truncate")
    with pytest.raises(ConfigError, match=r"No conversation is cut"):
        loader(dataset, folder, budget=cut)
    rule = CostRule(max_text_tokens=5)
    with pytest.raises(ConfigError, match=r"so max_text_tokens has no effect"):
        loader(dataset, folder, budget=sf.TokenBudget(max_tokens=400, max_samples=4, padded=False, cost=rule))
    fields = {"chat": sf.Conversation(processor=str(folder), max_tokens=400, packed=True)}
    spec = sf.BatchSpec(budget=BUDGET, micro_batches_per_step=1, lanes=1)
    with pytest.raises(ConfigError, match=r"packs them into one sequence; leave out packed"):
        sf.Loader(sf.open(dataset), split="train", seed=3, batch=spec, fields=fields, transform=dict)
