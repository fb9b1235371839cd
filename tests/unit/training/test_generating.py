"""Generated texts are those of a plain greedy loop over each sample alone."""

from __future__ import annotations

import gc
import io
import json
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from shardflow.config import dump_config, load_config
from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.format.counts import open_conversation_counts
from shardflow.format.writer import ShardWriter
from shardflow.training.checkpoint.files import CheckpointFolder
from shardflow.training.config import TrainConfig
from shardflow.training.jobs.generating import (
    LABELS,
    GenerateSettings,
    generate,
    has_word_scores,
    label_scores,
    word_scores,
)
from shardflow.training.run import train
from tests.conversation_case import FAMILIES, IMAGE_FAMILIES, make_folder
from tests.sweeps import sampled
from tests.tiny_runs import NUM_VAL, make_tiny_input, tiny_config
from tests.unit.training.test_conversations import TEMPLATE, make_run
from tests.unit.training.test_packed_conversations import packed_run

NEW_TOKENS = 6
OTHER_WORDS = {
    "do_sample": True,
    "temperature": 5.0,
    "top_p": 0.9,
    "repetition_penalty": 9.0,
    "no_repeat_ngram_size": 1,
    "min_new_tokens": 9,
}
"""What a folder may ask for in its ``generation_config.json``."""


def run_of(config: Path, *changes: str) -> Path:
    train(load_config(TrainConfig, config, ["run.max_steps=2", *changes]))
    return config.parent / "run"


def written(run: Path, **settings: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    output = run.parent / "answers.jsonl"
    summary = generate(GenerateSettings(run=run, output=output, max_new_tokens=NEW_TOKENS, **settings))
    assert output.stat().st_mode & 0o777 == 0o600
    assert not [*run.parent.glob("*.partial")]
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()], summary


def trained_model(folder: Path, run: Path, family: str) -> Any:
    """The folder's model with the weights of the run's checkpoint, read by transformers alone."""
    kind: Any = (
        transformers.AutoModelForImageTextToText
        if family in IMAGE_FAMILIES
        else transformers.AutoModelForCausalLM
    )
    model = kind.from_pretrained(str(folder), dtype=torch.float32).eval()
    checkpoint, _ = CheckpointFolder(run / "checkpoints", keep_last=1).newest_sound()
    assert checkpoint is not None
    own = model.state_dict()
    for name in checkpoint.model:
        own[name.removeprefix("model.")].copy_(checkpoint.model[name])
    return model


def plain_answer(
    model: Any, processor: Any, document: dict[str, Any], pictures: list[Any], end: int
) -> tuple[str, bool]:
    """The last answer of a conversation, a token at a time, without a cache, padding or a batch."""
    place = max(n for n, one in enumerate(document["messages"]) if one["role"] == "assistant")
    chat = []
    for message in document["messages"][:place]:
        parts = [
            {"type": "image", "image": pictures[p["image"]]} if p["type"] == "image" else p
            for p in message["content"]
        ]
        has_images = hasattr(processor, "image_processor")
        chat.append(
            {"role": message["role"], "content": parts if has_images else "".join(p["text"] for p in parts)}
        )
    asking = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    inputs = dict(processor.apply_chat_template([chat], tokenize=True, **asking))
    if not hasattr(processor, "image_processor"):
        # Line breaks before an answer are other tokens than at the end of a text: those of training count.
        begin = len(processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
        answer = {"role": "assistant", "content": document["messages"][place]["content"][0]["text"]}
        text = processor.apply_chat_template([*chat, answer], tokenize=False)
        whole = processor(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = zip(whole["input_ids"], whole["offset_mapping"], strict=True)
        ids = torch.tensor([[one for one, (_, stop) in spans if stop <= begin]])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    new: list[int] = []
    with torch.no_grad():
        while len(new) < NEW_TOKENS and end not in new:
            logits = model(**inputs, use_cache=False).logits
            new.append(int(logits[0, -1].argmax()))
            for name in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"):
                if name in inputs:
                    more = {"input_ids": new[-1], "attention_mask": 1}.get(name, 0)
                    inputs[name] = torch.cat([inputs[name], torch.tensor([[more]])], dim=1)
    words = getattr(processor, "tokenizer", processor)
    said = new[: new.index(end)] if end in new else new
    return words.decode(said, skip_special_tokens=True).strip(), end in new


@pytest.mark.parametrize("family", sampled(FAMILIES, {"llama", "gemma3", "qwen2_5_vl"}))
def test_answers_are_those_of_a_plain_loop(family: str, tmp_path: Path) -> None:
    from tests.integration.test_conversations import folder_of  # its processors need no torchvision

    config = make_run(tmp_path, family)
    settings = tmp_path / "model" / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | OTHER_WORDS), encoding="utf-8")
    run = run_of(config)
    rows, summary = written(run)
    model = trained_model(tmp_path / "model", run, family)
    _, processor = folder_of(family, tmp_path / "again")
    words = getattr(processor, "tokenizer", processor)
    names = {"llama": "<|eot_id|>", "gemma3": "<end_of_turn>", "llava": "</s>"}
    end = words.convert_tokens_to_ids(names.get(family, "<|im_end|>"))
    dataset = Dataset.open(str(tmp_path / "dataset"))
    keys = {dataset.samples.sample_key(row) for row in dataset.splits["val"]}
    assert {row["sample_key"] for row in rows} <= keys
    for row in rows:
        number = dataset.samples.find(row["sample_key"])
        document = json.loads(dataset.read_fields(number, ["conversation.json"])["conversation.json"])
        members = [one["member"] for one in document["images"]]
        payloads = dataset.read_fields(number, members) if members else {}
        pictures = [Image.open(io.BytesIO(payloads[name])).convert("RGB") for name in members]
        assert (row["text"], row["is_finished"]) == plain_answer(model, processor, document, pictures, end)
        assert row["reference"] == document["messages"][-1]["content"][0]["text"].strip()
    unlearned = 0  # answers that have no weight
    for key in keys - {row["sample_key"] for row in rows}:
        found = dataset.read_fields(dataset.samples.find(key), ["conversation.json"])["conversation.json"]
        unlearned += json.loads(found)["messages"][-1].get("weight") == 0
    assert len(rows) + unlearned == len(keys)
    assert summary["num_left_out"] == unlearned
    assert summary["num_texts"] == summary["scores"]["num_references"] == len(rows)


def test_what_slips_is_told(tmp_path: Path) -> None:
    run = run_of(make_run(tmp_path, "llama"))
    for settings, match in (
        ({"split": "tset"}, "eval_split"),
        ({"checkpoint": "step-9"}, "one of the run's"),
    ):
        with pytest.raises(ConfigError, match=match):
            written(run, **settings)
    with pytest.raises(ConfigError, match="stored ones end with the answer"):
        written(run, has_reference=False)
    with pytest.raises(ConfigError, match="resolved_config"):
        written(tmp_path)


def test_adapters_and_pairs_write_answers_too(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    run = run_of(make_run(tmp_path, "qwen2_5_vl", "dpo"), "lora.rank=2")
    rows, _ = written(run)
    assert rows
    wanted = {row["sample_key"]: row["reference"] for row in rows}
    dataset = Dataset.open(str(tmp_path / "dataset"))
    for key, reference in wanted.items():
        found = dataset.read_fields(dataset.samples.find(key), ["conversation.json"])["conversation.json"]
        document = json.loads(found)
        assert document["chosen"][0]["content"][0]["text"].strip() == reference


def test_pairs_that_were_packed_are_written_by_the_trained_model_alone(tmp_path: Path) -> None:
    config = packed_run(tmp_path, "qwen2", "dpo")
    dataset = Dataset.open(str(tmp_path / "dataset"))
    (processor,) = (one.name for one in (tmp_path / "dataset" / "conversations").iterdir())
    longest = int(open_conversation_counts(dataset, processor).tokens.sum(axis=1).max())
    run = run_of(
        config,
        f"batch={{max_tokens = {longest}, packed = true, micro_batches_per_step = 2}}",
        "run.precision=bf16",
        "model.frozen_dtype=bf16",
        'model.frozen=["model.model.embed_tokens"]',
    )
    seen: list[tuple[int, torch.dtype]] = []

    def note(module: Any, _: Any) -> None:
        kind = transformers.Qwen2ForCausalLM
        if type(module) is kind and torch.is_inference_mode_enabled() and not seen:
            num_models = sum(type(one) is kind for one in gc.get_objects())
            seen.append((num_models, module.model.embed_tokens.weight.dtype))

    gc.collect()
    with torch.nn.modules.module.register_module_forward_pre_hook(note):
        rows, summary = written(run)
    assert seen == [(1, torch.bfloat16)], "no reference, and what is not trained as the run held it"
    assert len(rows) + summary["num_left_out"] == len(dataset.splits["val"])


FIELDS = """
[fields.ask]
type = "text"
member = "ask.txt"
[fields.note]
type = "text"
member = "note.txt"
[fields.final]
type = "text"
member = "final.txt"
"""
TURNS = """
[[turns]]
role = "user"
text = "{ask}"
[[turns]]
role = "assistant"
text = "{note}"
when = "note"
[[turns]]
role = "user"
text = "More?"
when = "note"
[[turns]]
role = "assistant"
text = "{final}"
"""


def test_questions_of_a_template_need_no_answer(tmp_path: Path) -> None:
    """A question with a condition is left open where it is said, the one before it elsewhere."""
    processor = make_folder("llama", tmp_path / "model")
    asked: dict[str, list[str]] = {}
    with ShardWriter(tmp_path / "dataset", splits={"train": 1, "val": 1}, max_samples=4) as writer:
        for number in range(16):
            said = {"ask.txt": f"What of {number}?"}
            said |= {"note.txt": f"It is {number}."} if number % 2 else {}
            asked[f"talk{number:04d}"] = [*said.values(), *(["More?"] if number % 2 else [])]
            writer.write({"__key__": f"talk{number:04d}", "final.txt": "So it is.", **said})
    (tmp_path / "template.toml").write_text(TURNS, encoding="utf-8")
    head = TEMPLATE.format(task="sft", pairs="false").replace("pairs = false", 'template = "template.toml"')
    (tmp_path / "train.toml").write_text(head + FIELDS, encoding="utf-8")
    run = run_of(tmp_path / "train.toml")
    # What the answer would be is in no sample any more.
    config = load_config(TrainConfig, run / "resolved_config.toml")
    final: Any = config.fields["final"]
    fields = {**config.fields, "final": replace(final, member="gone.txt")}
    (run / "resolved_config.toml").write_text(dump_config(replace(config, fields=fields)), encoding="utf-8")
    rows, summary = written(run, has_reference=False)
    assert (summary["scores"], summary["num_lacking"]) == (None, {})
    keys = Dataset.open(str(tmp_path / "dataset"))
    assert {row["sample_key"] for row in rows} == {keys.samples.sample_key(n) for n in keys.splits["val"]}
    model = trained_model(tmp_path / "model", run, "llama")
    for row in rows:
        roles = ("user", "assistant") * 2
        texts = [*asked[row["sample_key"]], "..."]
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}]}
            for role, text in zip(roles, texts, strict=False)
        ]
        found = plain_answer(model, processor, {"messages": messages}, [], processor.eos_token_id)
        assert row == {"sample_key": row["sample_key"], "text": found[0], "is_finished": found[1]}
    talk: Any = fields["conversation"]
    turns = [replace(one, when="final") if one.role == "user" else one for one in talk.template.turns]
    fields["conversation"] = replace(talk, template=replace(talk.template, turns=tuple(turns)))
    fields["final"] = replace(fields["final"], missing="pad")
    (run / "resolved_config.toml").write_text(dump_config(replace(config, fields=fields)), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"None of the \d+ samples of the split has a question"):
        written(run, has_reference=False)


def test_reports_are_written_alike_in_any_batch(tmp_path: Path) -> None:
    tiny = make_tiny_input(tmp_path)
    config = tiny_config(tiny, tmp_path / "run", "run.max_steps=4", "data.eval_split=val")
    train(config)
    rows, summary = written(tmp_path / "run")
    assert summary["num_texts"] == len(rows) == NUM_VAL
    dataset = Dataset.open(str(tiny.dataset))
    for row in rows:
        found = dataset.read_fields(dataset.samples.find(row["sample_key"]), ["report.txt"])["report.txt"]
        assert row["reference"] == found.decode().strip()
    assert any(row["text"] for row in rows)
    path = tmp_path / "run" / "resolved_config.toml"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("micro_batch_size = 1", "micro_batch_size = 3"), encoding="utf-8")
    others, _ = written(tmp_path / "run")
    assert sorted(others, key=itemgetter("sample_key")) == sorted(rows, key=itemgetter("sample_key"))
    longer = generate(GenerateSettings(run=tmp_path / "run", output=tmp_path / "b.jsonl", max_new_tokens=12))
    said = {
        one["sample_key"]: one["text"]
        for one in map(json.loads, (tmp_path / "b.jsonl").read_text().splitlines())
    }
    assert longer["num_texts"] == NUM_VAL
    assert all(said[row["sample_key"]].startswith(row["text"].rstrip("\ufffd")) for row in rows)


def test_label_scores_follow_their_definition() -> None:
    texts = [
        "Small left pleural effusion. No pneumothorax.",
        "Pacemaker in place. Lungs are clear.",
        "Possible pneumonia.",
    ]
    references = ["Pleural effusion.", "Lungs are clear.", "No pneumonia. Cardiomegaly."]
    found = label_scores(texts, references)
    f1, support = found["label_f1"], found["label_support"]
    assert {name: one for name, one in f1.items() if one is not None} == {
        "No Finding": 1.0, "Cardiomegaly": 0.0, "Pneumonia": 0.0, "Pleural Effusion": 1.0,
        "Support Devices": 0.0,
    }  # fmt: skip
    assert {name: one for name, one in support.items() if one} == {
        "No Finding": 1,
        "Cardiomegaly": 1,
        "Pleural Effusion": 1,
    }
    assert found["label_f1_micro"] == pytest.approx(2 * 2 / 7)
    assert found["label_f1_macro"] == pytest.approx(2 / 3)
    assert len(LABELS) == 14


@pytest.mark.skipif(not has_word_scores(), reason="needs sacrebleu")
def test_word_scores_are_those_of_sacrebleu() -> None:
    same = word_scores(["No acute disease is seen."], ["No acute disease is seen."])
    other = word_scores(["No acute disease is seen."], ["Heart size normal."])
    assert (same["bleu"], same["chrf"]) == (pytest.approx(100.0), pytest.approx(100.0))
    assert other["bleu"] < 10 < same["chrf"]
