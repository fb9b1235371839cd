"""Rendering of conversations by the processor of a model: token ids, loss weights by role, pictures.

The processor is read from a local folder and called as `apply_chat_template` of transformers calls it, so its
outputs are equal in every bit; a model without pictures has a tokenizer alone. What is added are the weights
of the loss. They need to know which tokens belong to which message: by the generation markers of the chat
template, or, for a template without them, by rendering beginnings of the conversation, which must be
beginnings of the whole.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import hashlib
import io
import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError

PROCESSOR_GROUP: Final = "shardflow.processors"
"""Entry points whose name is that of a processor's class, and whose value derives from `Renderer`."""
_ADAPTER_VERSION: Final = 1
"""Part of the digest; another one where the same files would be rendered otherwise."""
_FILES: Final = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
_NAMING: Final = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
_GENERATION: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TODAY: Final = "strftime_now"
_DATED: Final = re.compile(r"\bdate_string\s+is\s+(?:not\s+)?defined")
_DATE: Final = "26 Jul 2024"
"""In place of today's date, so that every day renders the same; Llama's own where none is given."""
_ASSISTANT: Final = "assistant"
_ROLES: Final = frozenset({"system", "user", _ASSISTANT, "tool"})
EVERYTHING: Final = "everything"
"""In place of roles: every token is learned, those between messages too."""
# transformers notes the markers in a compiled template, of which a process has one.
_MARKED: Final = threading.Lock()
_BESIDE: Final = ("input_ids", "attention_mask", "offset_mapping", "text_replacement_offsets")
_GRID_POSITIONS: Final = frozenset({"Qwen2VLProcessor", "Qwen2_5_VLProcessor"})
_LARGEST_PICTURE: Final = (8192, 8192)


class RenderError(Exception):
    """A conversation cannot be rendered; the message holds none of its words."""


@dataclass(frozen=True, slots=True, eq=False)
class Rendered:
    """Conversation as a model takes it."""

    ids: NDArray[np.int64]
    """``(T,)``."""
    weights: NDArray[np.float32]
    """``(T,)``, weight of each token in the loss; 0 for what is not learned."""
    tokens: Mapping[str, NDArray[np.int64]]
    """Other entries with a number for each token, such as ``token_type_ids``, ``(T,)`` each."""
    pictures: Mapping[str, NDArray[Any]]
    """Entries of the pictures, such as ``pixel_values``, one picture after another on the first axis."""


@dataclass(frozen=True, slots=True)
class PictureEntry:
    """Entry of the pictures of a conversation."""

    dtype: str
    shape: tuple[int, ...]
    """Behind the first axis."""
    most_rows: int
    """Rows of a conversation, at most."""


@dataclass(frozen=True, slots=True)
class RenderedForm:
    """Entries that a processor returns, and their sizes."""

    tokens: tuple[str, ...]
    """Names of the entries with a number for each token, beside ids and mask."""
    pictures: Mapping[str, PictureEntry]


class Renderer:
    """Processor of a model, with weights of the loss. Not safe for threads: each needs its own.

    Args:
        processor: A processor of transformers, or a tokenizer for a model of text alone.
        digest: SHA-256 of its files.
    """

    def __init__(self, processor: Any, digest: str) -> None:
        self.processor, self.digest = processor, digest
        self.has_pictures = hasattr(processor, "image_processor")
        self.tokenizer: Any = getattr(processor, "tokenizer", processor)
        if not getattr(self.tokenizer, "is_fast", False):
            raise ConfigError(
                "processor must have a fast tokenizer, which says where tokens begin; add its tokenizer.json."
            )
        template: Any = getattr(processor, "chat_template", None)
        if isinstance(template, dict):
            template = template.get("default")
        self._template: str = template or ""
        if not self._template:
            raise ConfigError(
                "processor has no chat template, which turns messages into text; add chat_template.jinja to "
                "its folder."
            )
        if _TODAY in self._template and not _DATED.search(self._template):
            raise ConfigError(
                "processor has a chat template that writes the date of today, so that a resumed run would "
                "differ; put a date in place of strftime_now(...) in chat_template.jinja of its folder."
            )
        self._beside = {"date_string": _DATE} if _TODAY in self._template else {}
        added = self.tokenizer.added_tokens_decoder.values()
        self._special = tuple(str(one) for one in added if one.special)
        self._seen_sizes: dict[tuple[int, int], tuple[int, int]] = {}
        pad = self.tokenizer.pad_token_id
        self.pad_id = int(self.tokenizer.eos_token_id or 0 if pad is None else pad)

    @staticmethod
    def load(folder: str | Path) -> Renderer:
        """Load the processor of a local folder; nothing is downloaded, and no code of it is run.

        Raises:
            ConfigError: There is none, transformers is missing, or its chat template cannot be used.
        """
        path = Path(folder)
        digest = _digest(path)
        processor = _load_processor(path)
        name = type(processor).__name__
        kinds = {entry.name: entry for entry in entry_points(group=PROCESSOR_GROUP)}
        kind: type[Renderer] = kinds[name].load() if name in kinds else Renderer
        parts = [name, type(getattr(processor, "image_processor", None)).__name__, kind.__qualname__]
        made = kind(processor, digest)
        parts += made._beside.values()
        made.digest = hashlib.sha256(" ".join([digest, *parts]).encode()).hexdigest()
        return made

    def copy(self) -> Self:
        """Return one for another thread."""
        return type(self)(copy.deepcopy(self.processor), self.digest)

    @property
    def mrope(self) -> tuple[int, int] | None:
        """Id of a token of a picture, and patches on the side of one, where positions follow its grid.

        None where they are the places in the sequence.
        """
        if type(self.processor).__name__ not in _GRID_POSITIONS:
            return None
        token = self.tokenizer.convert_tokens_to_ids(self.processor.image_token)
        return int(token), int(self.processor.image_processor.merge_size)

    # ---- rendering -------------------------------------------------------------------------------

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        pictures: Sequence[Any],
        *,
        train_on: Sequence[str],
        first: int = 0,
    ) -> Rendered:
        """Render a conversation.

        Args:
            messages: With ``role``, ``content`` (parts of text, and of images by their number) and, where it
                is not 1, ``weight``.
            pictures: RGB images of Pillow, by number.
            train_on: Roles whose words are learned, or `EVERYTHING`.
            first: Number of the first message that may be learned.

        Raises:
            RenderError: It holds images and the model takes none, or the template cannot render it.
        """
        chat, used = self._chat(messages)
        if used and not self.has_pictures:
            raise RenderError("it holds images, and the processor takes text alone")
        weights = [_weight(one, train_on) if n >= first else 0.0 for n, one in enumerate(messages)]
        text, spans = (self._whole if EVERYTHING in train_on else self._text)(chat, weights)
        found = self.call(text, [pictures[number] for number in used])
        return self._weighed(found, spans)

    def render_document(self, messages: Sequence[Mapping[str, Any]], pictures: Sequence[Any]) -> Rendered:
        """Render text and images in order, without a template; all words are learned, and the end token.

        Raises:
            RenderError: It holds images and the model takes none.
        """
        parts = [part for message in messages for part in message["content"]]
        used = [int(part["image"]) for part in parts if part["type"] == "image"]
        if used and not self.has_pictures:
            raise RenderError("it holds images, and the processor takes text alone")
        token = getattr(self.processor, "image_token", "")
        text = "".join(token if part["type"] == "image" else part["text"] for part in parts)
        text = f"{self.tokenizer.bos_token or ''}{text}{self.tokenizer.eos_token or ''}"
        return self._weighed(self.call(text, [pictures[n] for n in used]), [(0, len(text), 1.0)])

    def call(self, text: str, pictures: Sequence[Any]) -> dict[str, Any]:
        """Call the processor as ``apply_chat_template`` does, for a batch of one.

        Raises:
            RenderError: It refuses the text, such as one with the words of a special token.
        """
        bos = self.tokenizer.bos_token
        settings: dict[str, Any] = {"return_tensors": "np", "return_offsets_mapping": True}
        if not self.has_pictures:
            settings["add_special_tokens"] = False
        else:
            settings["return_text_replacement_offsets"] = True
            settings["images"] = [list(pictures)] if pictures else None
            if bos is not None and text.startswith(bos):
                settings["add_special_tokens"] = False
        try:
            return dict(self.processor(text=[text], **settings))
        except Exception as error:  # noqa: BLE001 - a processor may raise anything, with words of the text
            raise RenderError(f"the processor raised {type(error).__name__}") from None

    def _chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[int]]:
        """Return messages as templates take them, and the numbers of the pictures in order."""
        chat, used = [], []
        for message in messages:
            parts = message["content"]
            used += [int(part["image"]) for part in parts if part["type"] == "image"]
            content: Any = [
                {"type": "image"} if part["type"] == "image" else {"type": "text", "text": part["text"]}
                for part in parts
            ]
            if not self.has_pictures:
                content = "".join(part["text"] for part in parts if part["type"] == "text")
            chat.append({"role": message["role"], "content": content})
        return chat, used

    def _text(
        self, chat: list[dict[str, Any]], weights: list[float]
    ) -> tuple[str, list[tuple[int, int, float]]]:
        """Render the template; also return begin, end and weight of what is learned, in characters."""
        learned = [number for number, weight in enumerate(weights) if weight]
        is_marked = _GENERATION.search(self._template) is not None
        text, marked = self._apply(chat, is_marked=is_marked)
        of_assistant = [number for number, one in enumerate(chat) if one["role"] == _ASSISTANT]
        if is_marked and len(marked) == len(of_assistant) and {*learned} <= {*of_assistant}:
            pairs = zip(of_assistant, marked, strict=True)
            return text, [(a, b, weights[number]) for number, (a, b) in pairs if weights[number]]
        spans = []
        for number in learned:
            is_answer = chat[number]["role"] == _ASSISTANT
            start = self._beginning(text, chat[:number], is_answer=is_answer)
            stop = self._beginning(text, chat[: number + 1], is_answer=False)
            spans.append((start, self._without_end(text, start, stop), weights[number]))
        return text, spans

    def _whole(
        self, chat: list[dict[str, Any]], weights: list[float]
    ) -> tuple[str, list[tuple[int, int, float]]]:
        """Render the template where all of it is learned, but for messages of another weight."""
        others = [number for number, weight in enumerate(weights) if weight != 1]
        if not others:
            text, _ = self._apply(chat)
            return text, [(0, len(text), 1.0)]
        text, spans = self._text(chat, [float(weight != 1) for weight in weights])
        pairs = zip(spans, others, strict=True)
        return text, [(0, len(text), 1.0), *((start, stop, weights[n]) for (start, stop, _), n in pairs)]

    def _beginning(self, text: str, chat: list[dict[str, Any]], *, is_answer: bool) -> int:
        """Return the length of the text of the first messages, and where an answer follows of its header.

        Raises:
            RenderError: It is not how the whole begins.
        """
        if not chat and not is_answer:
            return 0
        start, _ = self._apply(chat, asks=is_answer)
        if not text.startswith(start):
            raise RenderError(
                "the chat template renders the beginning of a conversation otherwise than the whole, so that "
                "no token has a role; add {% generation %} markers around the assistant's words to it"
            )
        return len(start)

    def _without_end(self, text: str, start: int, stop: int) -> int:
        """Leave out white space behind a special token: generation ends before it."""
        shorter = start + len(text[start:stop].rstrip())
        return shorter if shorter > start and text[start:shorter].endswith(self._special) else stop

    def _apply(
        self, chat: list[dict[str, Any]], *, is_marked: bool = False, asks: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            # A render without notes would still write into those of another thread.
            with _MARKED if _GENERATION.search(self._template) else contextlib.nullcontext():
                rendered: Any = render_jinja_template(
                    conversations=[chat],
                    chat_template=self._template,
                    return_assistant_tokens_mask=is_marked,
                    add_generation_prompt=asks,
                    **self._beside,
                    **self.tokenizer.special_tokens_map,
                )
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            raise RenderError(f"the chat template raised {type(error).__name__}") from None
        texts, indices = rendered
        return texts[0], list(indices[0]) if is_marked else []

    def _weighed(self, found: dict[str, Any], spans: Sequence[tuple[int, int, float]]) -> Rendered:
        """Give each token its weight, and sort the entries."""
        ids = np.asarray(found["input_ids"][0], np.int64)
        offsets = np.asarray(found["offset_mapping"][0], np.int64)
        replaced = (found.get("text_replacement_offsets") or [[]])[0]
        ends = [int(one["span"][1]) for one in replaced]
        gained = [0, *(int(one["new_span"][1]) - int(one["span"][1]) for one in replaced)]
        weights = np.zeros(len(ids), np.float32)
        for start, stop, weight in spans:
            first, last = (at + gained[bisect.bisect_right(ends, at)] for at in (start, stop))
            weights[(offsets[:, 0] < last) & (offsets[:, 1] > first)] = weight
        for one in replaced:  # what stands for a picture is never predicted
            first, last = map(int, one["new_span"])
            weights[(offsets[:, 0] < last) & (offsets[:, 1] > first)] = 0.0
        tokens: dict[str, NDArray[np.int64]] = {}
        pictures: dict[str, NDArray[Any]] = {}
        for name, value in found.items():
            if name in _BESIDE:
                continue
            array = np.asarray(value)
            is_of_tokens = array.shape[:2] == (1, len(ids)) and array.ndim == 2 and array.dtype.kind in "iub"
            if is_of_tokens:
                tokens[name] = array[0].astype(np.int64)
            else:
                pictures[name] = array
        return Rendered(ids, weights, tokens, pictures)

    def pieces(self, rendered: Rendered, num_pictures: int | None = None) -> list[tuple[str, float] | int]:
        """Return a rendered conversation for people: texts with their weight, and numbers of pictures.

        Args:
            rendered: What the processor returned.
            num_pictures: Pictures that it shows; each stands where the model has its tokens. None for as many
                as there are runs of these tokens.
        """
        token = getattr(self.processor, "image_token_id", None)
        is_picture = rendered.ids == (-1 if token is None else int(token))
        is_new = np.diff(is_picture, prepend=False) | (np.diff(rendered.weights, prepend=0) != 0)
        edges = [0, *np.flatnonzero(is_new).tolist(), len(rendered.ids)]
        found: list[tuple[str, float] | int] = []
        for start, stop in pairwise(edges):
            if start == stop:
                continue
            if is_picture[start]:
                found.append(sum(isinstance(one, int) for one in found))
                continue
            found.append(
                (str(self.tokenizer.decode(rendered.ids[start:stop])), float(rendered.weights[start]))
            )
        num_found = sum(isinstance(one, int) for one in found)
        if num_pictures is not None and num_found != num_pictures:  # a family with tokens between rows
            return [*range(num_pictures), *(one for one in found if not isinstance(one, int))]
        return found

    def example(self, pictures: Sequence[Any]) -> Rendered:
        """Return a small conversation about some pictures.

        Raises:
            ConfigError: The template cannot render it.
        """
        try:
            return self.render(_turns(len(pictures)), pictures, train_on=(_ASSISTANT,))
        except RenderError as error:
            raise ConfigError(f"processor cannot be used: {error}.") from None

    # ---- sizes -----------------------------------------------------------------------------------

    def form(self, max_tokens: int, max_images: int | None) -> RenderedForm:
        """Return the entries of rendered conversations, learned from two pictures.

        Args:
            max_tokens: Tokens of a conversation, at most.
            max_images: Pictures of a conversation, at most; None for as many as fit.

        Raises:
            ConfigError: The template cannot render a conversation of two turns.
        """
        plain = self.example(())
        if not plain.weights.any():
            raise ConfigError(
                "processor has a chat template that writes no word of the assistant; take that of the model."
            )
        if not self.has_pictures or max_images == 0:
            return RenderedForm(tuple(sorted(plain.tokens)), {})
        probes = [self.example([blank_picture(*size)]) for size in ((64, 64), (448, 448))]
        sizes = [len(one.ids) - len(plain.ids) for one in probes]
        per_picture = max(1, min(sizes))
        most = max_tokens // per_picture if max_images is None else min(max_images, max_tokens // per_picture)
        tokens = min(max_tokens, max(1, most) * self._most_tokens(max(sizes)))
        entries = {}
        for name, small in probes[0].pictures.items():
            rows = [len(one.pictures[name]) for one in probes]
            bound = max(1, most) * rows[0]
            if rows[0] != rows[1]:  # grows with the picture, as its tokens do
                bound = -(-(rows[1] - rows[0]) * tokens // max(1, sizes[1] - sizes[0]))
            entries[name] = PictureEntry(small.dtype.str, small.shape[1:], bound)
        return RenderedForm(tuple(sorted(probes[0].tokens)), entries)

    def largest(self, max_tokens: int, max_images: int | None) -> Rendered:
        """Return a conversation of the most tokens, mostly those of pictures; its words mean nothing.

        Args:
            max_tokens: Tokens of a conversation, at most.
            max_images: Pictures of a conversation, at most; None for as many as fit, of the
                largest size where sizes differ.

        Raises:
            ConfigError: The template cannot render it, or has more tokens than that without words.
        """
        pictures = []
        if self.has_pictures and max_images != 0:
            room, small = max_tokens - len(self.example(()).ids), (64, 64)
            each = len(self.example([blank_picture(*small)]).ids) - (max_tokens - room)
            num = room // each if max_images is None else min(max_images, room // each)
            count: Any = getattr(self.processor, "_get_num_multimodal_tokens", None)
            if self.keeps_sizes and count is not None:

                def tokens(side: int) -> int:
                    return int(count(image_sizes=[[side, side]]).num_image_tokens[0])

                beside = each - tokens(small[0])
                largest = tokens(_LARGEST_PICTURE[0]) + beside
                num = min(num, max_images or max(1, room // largest))
                sides = range(small[0], _LARGEST_PICTURE[0], small[0] // 2)
                fits = bisect.bisect_right(sides, room // max(num, 1) - beside, key=tokens)
                most = tokens(sides[max(fits - 1, 0)])
                small = (sides[bisect.bisect_left(sides, most, key=tokens)],) * 2
            pictures = [blank_picture(*small)] * num
        found = self.example(pictures)
        more = max_tokens - len(found.ids)
        if more < 0:
            raise ConfigError(
                f"A sequence has {max_tokens} tokens at most, and a small conversation has {len(found.ids)}; "
                "raise fields.conversation.max_tokens or batch.max_tokens."
            )
        return Rendered(
            np.pad(found.ids, (0, more), mode="edge"),
            np.pad(found.weights, (0, more), constant_values=1),
            {name: np.pad(one, (0, more)) for name, one in found.tokens.items()},
            found.pictures,
        )

    def cuts(self, size: tuple[int, int] | None) -> bool:
        """Whether the model may see a part of an image of some rows and columns in place of the whole.

        Args:
            size: Rows and columns; None where they differ between images.
        """
        settings: Any = getattr(self.processor, "image_processor", None)
        if getattr(settings, "do_pan_and_scan", None):
            return size is None or size[0] != size[1]
        if not getattr(settings, "do_center_crop", None):
            return False
        sides, cut = dict(settings.size or {}), dict(settings.crop_size or {})
        shortest = sides.get("shortest_edge")
        whole = sides if shortest is None else {"height": shortest, "width": shortest}
        is_square = size is not None and size[0] == size[1]
        return whole != {name: cut.get(name) for name in whole} or (shortest is not None and not is_square)

    @property
    def keeps_sizes(self) -> bool:
        """Whether each image has a size of its own when the model sees it, and the processor tells it."""
        settings: Any = getattr(self.processor, "image_processor", None)
        return hasattr(settings, "patch_size") and "image_grid_thw" in getattr(
            settings, "model_input_names", ()
        )

    def seen_size(self, rows: int, columns: int) -> tuple[int, int]:
        """Return rows and columns of an image when the model sees it, by resizing a black one."""
        if (rows, columns) not in self._seen_sizes:
            settings: Any = self.processor.image_processor
            grid = settings(images=[blank_picture(rows, columns)], return_tensors="np")["image_grid_thw"][0]
            found = int(grid[1]) * int(settings.patch_size), int(grid[2]) * int(settings.patch_size)
            self._seen_sizes[rows, columns] = found
        return self._seen_sizes[rows, columns]

    def _most_tokens(self, seen: int) -> int:
        """Return how many tokens the largest picture may have."""
        count: Any = getattr(self.processor, "_get_num_multimodal_tokens", None)
        if count is None:
            return 1 << 40
        return max(seen, int(count(image_sizes=[list(_LARGEST_PICTURE)]).num_image_tokens[0]) + seen)


def decode_picture(payload: bytes) -> Any:
    """Decode a stored picture as Pillow does: turned upright, RGB; 16 bits of gray become 8.

    Raises:
        RenderError: It cannot be decoded.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(payload)) as opened:
            image: Any = ImageOps.exif_transpose(opened)
            if image.mode.startswith("I"):
                image = Image.fromarray((np.asarray(image).astype(np.int64) // 257).astype(np.uint8))
            return image.convert("RGB")
    except Exception as error:  # noqa: BLE001 - plugins raise what they like for broken files
        raise RenderError(f"a picture cannot be decoded ({type(error).__name__})") from None


def blank_picture(rows: int, columns: int) -> Any:
    """Return a black RGB image."""
    from PIL import Image

    return Image.new("RGB", (columns, rows))


def _turns(num_images: int) -> list[dict[str, Any]]:
    images = [{"type": "image", "image": number} for number in range(num_images)]
    words = [{"type": "text", "text": "What is seen?"}]
    answer = [{"type": "text", "text": "Clear lungs."}]
    return [
        {"role": "user", "content": [*images, *words]},
        {"role": _ASSISTANT, "content": answer},
        {"role": "user", "content": words},
        {"role": _ASSISTANT, "content": answer},
    ]


def roles_of(given: Any) -> tuple[str, ...]:
    """Check the roles whose words are learned, or `EVERYTHING` alone, and return them.

    Raises:
        ConfigError: They are none of these.
    """
    if isinstance(given, str) or not given or not ({*given} <= _ROLES or {*given} == {EVERYTHING}):
        known = ", ".join(sorted(_ROLES))
        raise ConfigError(f"train_on names roles, of {known}, or {EVERYTHING!r} alone, got {given!r}.")
    return tuple(given)


def _weight(message: Mapping[str, Any], train_on: Sequence[str]) -> float:
    is_learned = message["role"] in train_on or EVERYTHING in train_on
    return float(message.get("weight", 1.0)) if is_learned else 0.0


def _digest(folder: Path) -> str:
    digest = hashlib.sha256(f"conversation adapter {_ADAPTER_VERSION}\n".encode())
    found = [name for name in _FILES if (folder / name).is_file()]
    if "tokenizer.json" not in found:
        raise ConfigError(
            "processor must be a local folder with a tokenizer.json, got none; write the folder that "
            "processor.save_pretrained() wrote."
        )
    for name in found:
        digest.update(f"{name} {hashlib.sha256((folder / name).read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _load_processor(folder: Path) -> Any:
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            "Conversations are rendered by transformers, which is not installed; install shardflow[train]."
        ) from None
    name = next((found for file in _NAMING if (found := _named_class(folder / file))), "")
    try:
        if not name:
            return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        kind: Any = getattr(transformers, name, transformers.AutoProcessor)
        if not transformers.utils.is_torchvision_available() and hasattr(kind, "get_attributes"):
            kind = _without_video(kind)
        return kind.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # noqa: BLE001 - whatever a broken folder makes of it
        raise ConfigError(
            f"processor must be a folder that transformers can read, got {type(error).__name__} "
            f"({folder.name}); write the one that processor.save_pretrained() wrote."
        ) from None


def _named_class(path: Path) -> str:
    try:
        found = json.loads(path.read_bytes()).get("processor_class")
    except (OSError, ValueError):
        return ""
    return found if isinstance(found, str) else ""


def _without_video(kind: Any) -> Any:
    """Return a processor's class without its part for videos, which needs torchvision."""
    kept = [name for name in kind.get_attributes() if name != "video_processor"]
    if len(kept) == len(kind.get_attributes()):
        return kind
    return type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda _: list(kept))})
