"""Tiny processors and models of the families that conversations train, and generated conversations."""

from __future__ import annotations

import atexit
import functools
import io
import random
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from shardflow.fields.conversations.rendering import _without_video
from shardflow.format.writer import ShardWriter

__all__ = ["FAMILIES", "IMAGE_FAMILIES", "generate", "make_folder", "write_conversations"]

FAMILIES: Final = ("llama", "qwen2", "qwen2_vl", "qwen2_5_vl", "gemma3", "llava")
IMAGE_FAMILIES: Final = FAMILIES[2:]
WEIGHTED = 0.2
"""Share of answers with a weight of their own."""
_WORDS: Final = (
    "The lungs are clear. No effusion, no pneumothorax.\nHeart size is normal; Größe 3,2 cm, 肺 clear. "
    "What is seen? Compare with the prior study: stable since 2019-03-04. \n\n  Answer: yes. "
)
_CHATML: Final = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nYou are a "
    "helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}"
    "{{ m['content'] }}{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAMA: Final = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | trim }}<|eot_id|>{% endgeneration %}"
    "{% else %}{{ m['content'] | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_GEMMA: Final = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set head = messages[0].content[0].text "
    "+ '\n\n' %}{% set rest = messages[1:] %}{% else %}{% set head = '' %}{% set rest = messages %}"
    "{% endif %}{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{% if loop.first %}{{ head }}{% endif %}{% for c in m['content'] %}{% if c['type'] == 'image' %}"
    "<start_of_image>{% else %}{{ c['text'] | trim }}{% endif %}{% endfor %}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_LLAVA: Final = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'][0]['text'] }} "
    "{% else %}{{ m['role'] | upper }}: {% for c in m['content'] %}{% if c['type'] == 'image' %}<image>\n"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{{ eos_token if m['role'] == 'assistant' else ' ' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
_QWEN_TOKENS: Final = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
_GEMMA_TOKENS: Final = (
    "<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>",
    "<image_soft_token>",
)  # fmt: skip
_LLAMA_TOKENS: Final = ("<|begin|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")


def _tokenizer(tokens: Sequence[str], **settings: Any) -> Any:
    """A byte-level BPE of 400 tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator([_WORDS] * 3, trainer=trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, model_max_length=100_000, **settings)


def _processor(family: str) -> Any:
    if family == "llama":
        words = _tokenizer(_LLAMA_TOKENS, bos_token="<|begin|>", eos_token="<|eot_id|>")
        words.chat_template = _LLAMA
        return words
    if family.startswith("qwen2"):
        words = _tokenizer(_QWEN_TOKENS, eos_token="<|im_end|>", pad_token="<|endoftext|>")
        words.chat_template = _CHATML
        if family == "qwen2":
            return words
        images = transformers.Qwen2VLImageProcessorPil(
            size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16}
        )
        kind = transformers.Qwen2VLProcessor if family == "qwen2_vl" else transformers.Qwen2_5_VLProcessor
        return _without_video(kind)(images, words, chat_template=_CHATML)
    if family == "gemma3":
        extra = {
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        }
        words = _tokenizer(
            _GEMMA_TOKENS, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", extra_special_tokens=extra
        )
        images = transformers.Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
        return transformers.Gemma3Processor(images, words, chat_template=_GEMMA, image_seq_length=4)
    marks = ("<pad>", "<s>", "</s>", "<image>")
    words = _tokenizer(marks, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    images = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
    )
    return transformers.LlavaProcessor(
        images, words, patch_size=14, vision_feature_select_strategy="default", chat_template=_LLAVA,
        num_additional_image_tokens=1,
    )  # fmt: skip


def _config(family: str, words: Any) -> Any:
    small = {
        "vocab_size": len(words),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "bos_token_id": words.bos_token_id,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id,
    }
    one = words.convert_tokens_to_ids
    if family == "llama":
        return transformers.LlamaConfig(**small)
    if family == "qwen2":
        return transformers.Qwen2Config(**small)
    if family.startswith("qwen2"):
        is_newer = family == "qwen2_5_vl"
        kind = transformers.Qwen2_5_VLConfig if is_newer else transformers.Qwen2VLConfig
        vision: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": 14}
        if is_newer:
            vision |= {
                "hidden_size": 32,
                "intermediate_size": 64,
                "out_hidden_size": 32,
                "fullatt_block_indexes": [1],
                "window_size": 56,
            }
        else:
            vision |= {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
        return kind(
            text_config={**small, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
            vision_config=vision,
            image_token_id=one("<|image_pad|>"),
            video_token_id=one("<|video_pad|>"),
            vision_start_token_id=one("<|vision_start|>"),
            vision_end_token_id=one("<|vision_end|>"),
        )
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    if family == "gemma3":
        return transformers.Gemma3Config(
            text_config={**small, "head_dim": 16, "sliding_window": 512},
            vision_config={**vision, "patch_size": 7, "vision_use_head": False},
            mm_tokens_per_image=4,
            boi_token_index=one("<start_of_image>"),
            eoi_token_index=one("<end_of_image>"),
            image_token_index=one("<image_soft_token>"),
        )
    return transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**small),
        vision_config=transformers.CLIPVisionConfig(**vision),
        image_token_index=one("<image>"),
    )


def make_folder(family: str, folder: Path, *, with_model: bool = True) -> Any:
    """Save a processor, and a model of random weights, into a folder; return the processor."""
    processor = _processor(family)
    processor.save_pretrained(str(folder))
    if with_model:
        shutil.copytree(_model_folder(family), folder, dirs_exist_ok=True)
        torch.manual_seed(7)  # whether it was made now or before
    return processor


@functools.cache
def _model_folder(family: str) -> Path:
    """A folder with the model alone, made once a process."""
    processor = _processor(family)
    config = _config(family, getattr(processor, "tokenizer", processor))
    torch.manual_seed(7)
    kinds: Any = (
        transformers.AutoModelForImageTextToText
        if family in IMAGE_FAMILIES
        else transformers.AutoModelForCausalLM
    )
    transformers.utils.logging.disable_progress_bar()
    folder = Path(tempfile.mkdtemp(prefix=f"{family}-"))
    atexit.register(shutil.rmtree, folder)
    kinds.from_config(config).save_pretrained(str(folder))
    return folder


def _words(draws: random.Random, most: int) -> str:
    start = draws.randrange(len(_WORDS) - 1)
    return (_WORDS[start:] + _WORDS)[: draws.randint(1, most)].strip() or "x"


def _picture(draws: random.Random) -> Any:
    rows, columns = draws.randint(20, 90), draws.randint(20, 90)
    pixels = np.random.default_rng(draws.randrange(1 << 30)).integers(0, 256, (rows, columns, 3), np.uint8)
    return Image.fromarray(pixels[..., 0] if draws.random() < 0.3 else pixels)


def generate(
    num: int, seed: int, *, max_images: int = 2, pairs: bool = False
) -> list[tuple[dict[str, Any], list[Any]]]:
    """Generate stored conversations and their pictures, some of them without, some with a system message."""
    draws = random.Random(seed)
    found = []
    for _ in range(num):
        pictures = [_picture(draws) for _ in range(draws.randint(0, max_images))]
        waiting = list(range(len(pictures)))
        messages: list[dict[str, Any]] = []
        if draws.random() < 0.3:
            messages.append({"role": "system", "content": [{"type": "text", "text": "You read images."}]})
        num_turns = draws.randint(1, 3)
        for turn in range(num_turns):
            here = waiting if turn == num_turns - 1 else waiting[: draws.randint(0, len(waiting))]
            waiting = waiting[len(here) :]
            content: list[dict[str, Any]] = [{"type": "image", "image": number} for number in here]
            content.insert(draws.randint(0, len(content)), {"type": "text", "text": _words(draws, 60)})
            messages.append({"role": "user", "content": content})
            messages.append(_answer(draws))
        document: dict[str, Any] = {"format_version": 1, "kind": "conversation", "form": "messages"}
        if pairs:
            document |= {"kind": "preference", "chosen": [messages.pop()], "rejected": [_answer(draws)]}
        document |= {"messages": messages, "images": [{"member": _member(n)} for n in range(len(pictures))]}
        found.append((document, pictures))
    return found


def _answer(draws: random.Random) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": [{"type": "text", "text": _words(draws, 40)}],
    }
    if draws.random() < WEIGHTED:
        answer["weight"] = draws.choice([0.0, 0.5, 2.0])
    return answer


def _member(number: int) -> str:
    return f"image.{number:03d}.png"


def write_conversations(
    folder: Path,
    found: Sequence[tuple[Mapping[str, Any], Sequence[Any]]],
    *,
    splits: Mapping[str, int] | None = None,
) -> Path:
    """Write conversations into a dataset, four or so a shard."""
    with ShardWriter(folder, max_samples=8, splits=splits) as writer:
        for number, (document, pictures) in enumerate(found):
            sample: dict[str, Any] = {"__key__": f"talk{number:04d}", "conversation.json": dict(document)}
            for place, picture in enumerate(pictures):
                data = io.BytesIO()
                picture.save(data, "PNG")
                sample[_member(place)] = data.getvalue()
            writer.write(sample)
    return folder
