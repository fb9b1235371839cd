"""Field of conversations: rendered in the loader's threads, in the sizes that the field allows.

A conversation is stored, or made by a template from other fields and columns of a study.
No table knows how long a rendered conversation is, so each slot has room for ``max_tokens`` and the pictures
that fit into them; a batch shows as much of it as its longest conversation needs.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
from numpy.typing import NDArray

from shardflow.config import PLACE
from shardflow.errors import ConfigError
from shardflow.fields.conversations.arrays import ConversationArrays, present_conversations
from shardflow.fields.conversations.rendering import Rendered, RenderedForm, Renderer, RenderError, roles_of
from shardflow.fields.conversations.stored import PICTURE_NAME, PlannedCounts, Span, StoredConversation
from shardflow.fields.conversations.templates import IncompleteError, Template, load_template
from shardflow.fields.conversations.views import TemplateValues
from shardflow.fields.decode import ThreadState
from shardflow.fields.field import (
    Arrays,
    ArraySpec,
    BoundField,
    DrawKey,
    Field,
    FieldContext,
    NoContent,
    SlotContent,
    SlotRequest,
    Slots,
    check_choice,
    check_count,
)
from shardflow.fields.quarantine import BadSampleReason
from shardflow.fields.reader import Shard
from shardflow.fields.types.members import BoundMember, check_member
from shardflow.fields.units import PartDataset
from shardflow.format.counts import ConversationCounts, CountedTemplate
from shardflow.format.keys import CONVERSATION_FIELD
from shardflow.sampling.budget import TokenBudget

_MAX_TOKENS: Final = 1 << 24
INCOMPLETE: Final = "incomplete_conversations"
"""Counter of samples for which a template lacks a value; with ``.`` and a name those that lack it."""


@dataclass(frozen=True, kw_only=True)
class Conversation(Field):
    """Conversation, rendered for a model by its own processor.

    The entry is ``(B, L)`` int64, the token ids, padded behind each; L is the longest of the batch. Beside
    it: ``NAME_mask`` ``(B, L)`` uint8, 1 for a token; ``NAME_weights`` ``(B, L)`` float32, the weight of each
    token in the loss, 0 for what is not learned; and what else the processor returns under its own name:
    ``NAME_token_type_ids`` ``(B, L)``, ``NAME_pixel_values`` and ``NAME_image_grid_thw`` of all pictures of
    the batch, one after another on the first axis; those of slot b are rows ``NAME_pixel_values_offsets[b]``
    to ``[b + 1]`` (``(B + 1,)`` int64), and so on. With ``pairs`` the arrays of tokens are ``(B, 2, L)``, the
    chosen conversation and the rejected one, and pictures follow in this order. All are equal in every bit to
    what the processor returns for the conversation.

    With ``scores`` the entry ``NAME_score`` ``(B,)`` float32 is the number of each conversation of the kind
    ``reward``, and one of another kind is a bad sample.

    With ``split_long`` a sample is a part of a conversation, and its key that of the study with ``p`` and a
    number, such as ``ab12p0``. Parts are as many whole turns, a question and its answers, as have up to
    ``max_tokens`` tokens; each begins with the system messages that the conversation begins with, as the
    model is always told them, which the first part alone learns. Pictures stay with their turn. A turn that
    is too long alone, and a document, which has none, are as ``long`` says. The parts are those that
    ``shardflow tokenize --processor DIR --max-tokens N`` counted.

    With ``template`` the conversation is made from columns and other fields of the loader, see `Template`;
    with ``pairs`` its last turn has a chosen and a rejected answer. Where a sample lacks a value that it
    names, ``missing="error"`` masks the slot and counts a bad sample, and ``"pad"`` leaves the slot without
    tokens and counts it as ``incomplete_conversations`` and, by what is missing, as
    ``incomplete_conversations.NAME``; ``NAME`` is ``when`` where no turn applies, and ``rejected`` where both
    answers are the same. Under a token budget ``"pad"`` leaves such samples out of every epoch; their number
    is logged. A field that only turns with ``when`` name may be missing where none of these is said, also
    with ``missing="error"``.

    With ``packed`` the conversations of a micro-batch are one row of T tokens, one behind another: the
    entry, mask, weights and ``token_type_ids`` are ``(1, T)``, and beside them are ``NAME_labels`` ``(1, T)``
    int64, the ids of learned tokens and -100 elsewhere, for a model that shifts them itself;
    ``NAME_position_ids`` ``(1, T)`` int64, which begin at 0 in each conversation, and for Qwen2-VL and
    Qwen2.5-VL ``(4, 1, T)``, these and the positions in time, rows and columns; ``NAME_segment_ids``
    ``(1, T)`` int64, the number of the conversation (of a pair 2 b and 2 b + 1); and ``NAME_cu_seqlens``
    ``(n + 1,)`` int32, where each begins. The weight of the first token of each is 0. A bad sample is
    padding of its planned length.

    Under a token budget a conversation costs as many tokens as ``shardflow tokenize --processor`` counted,
    for a template with ``--fields``; a pair costs both sequences. 64 of the counts are compared with what the
    processor renders, before step 0.

    Example::

        sf.Conversation(processor="Qwen2.5-VL-7B-Instruct", max_tokens=4096)

    Raises:
        ConfigError: A setting is out of range.
    """

    type_name: ClassVar[str] = "conversation"
    own_suffixes: ClassVar[frozenset[str]] = frozenset(
        {"labels", "position_ids", "segment_ids", "cu_seqlens", "token_type_ids", "score"}
    )

    processor: Annotated[str, PLACE] = field(metadata={"is_place": True})
    """Local folder of the model's processor, or of its tokenizer for a model of text alone; both have a chat
    template. What counts for the identity of batches are its files, not its name."""
    max_tokens: int
    """Most tokens of a rendered conversation, those of pictures included."""
    train_on: tuple[str, ...] = ("assistant",)
    """Roles whose words are learned: an assistant's answer to its end token without the header before it,
    all of other messages. A message's own ``weight`` multiplies it. Of pairs only what follows the shared
    messages is learned. ``("everything",)`` learns all tokens, headers too, but for those of pictures."""
    long: Literal["error", "skip"] = "error"
    """Conversations longer than ``max_tokens``, or with more pictures than ``max_images``; nothing is cut.
    ``error`` masks their slot and counts a bad sample; ``skip`` leaves their slot without tokens and counts
    it as ``long_conversations`` of `Loader.counters`. Under a token budget ``error`` refuses the loader, and
    ``skip`` leaves them out of every epoch; their number is logged."""
    split_long: bool = False
    """Whether conversations of more than ``max_tokens`` are split into parts, each a sample of its own."""
    packed: bool = False
    """Whether the conversations of a micro-batch share one sequence; needs a token budget with
    ``padded=False``."""
    pairs: bool = False
    """Whether samples are preferences, a chosen and a rejected end of the same conversation."""
    scores: bool = False
    """Whether samples are conversations with a score."""
    max_images: int | None = None
    """Most pictures of a conversation; 0 for text alone. Less memory is set aside than for as many as fit
    into ``max_tokens``."""
    template: Annotated[str, PLACE] | Template | None = None
    """Template, or its TOML file, that makes conversations of studies; None for stored ones. A token budget
    needs one of ``draws="sample"``, unless there is one phrasing of each turn."""
    member: str = CONVERSATION_FIELD
    """Stored field that holds the conversation."""
    max_bytes: int = 1 << 20
    """Size that it may have; a larger one masks its slot."""

    def __post_init__(self) -> None:
        check_member(self)
        check_choice("long", self.long, ("error", "skip"))
        check_count("max_tokens", self.max_tokens, _MAX_TOKENS)
        if self.max_images != 0 and self.max_images is not None:
            check_count("max_images", self.max_images, _MAX_TOKENS)
        for name in ("pairs", "packed", "split_long", "scores"):
            if getattr(self, name) not in (True, False):
                raise ConfigError(f"{name} is True or False, got {getattr(self, name)!r}.")
        object.__setattr__(self, "train_on", roles_of(self.train_on))
        if "://" in str(self.processor):
            raise ConfigError("processor is a local folder, got an address; download it first.")
        object.__setattr__(self, "processor", str(self.processor))
        if self.scores and (self.pairs or self.split_long or self.template is not None):
            raise ConfigError(
                "scores are those of whole stored conversations; leave out pairs, split_long and template, "
                "or scores."
            )
        if self.split_long and (self.pairs or self.member != CONVERSATION_FIELD):
            raise ConfigError(
                f"split_long splits single conversations, of {CONVERSATION_FIELD}; leave out pairs and "
                "member, or split_long."
            )
        if self.template is None:
            return
        template = load_template(self.template)
        object.__setattr__(self, "template", template)
        if self.split_long or self.member != CONVERSATION_FIELD:
            raise ConfigError(
                "A template makes whole conversations, which are not stored; leave out split_long and "
                "member, or template."
            )
        if template.has_pairs != self.pairs:
            raise ConfigError(
                "pairs = true needs a template whose last turn has chosen and rejected in place of text; "
                "write them, or leave out pairs."
                if self.pairs
                else "The last turn of the template has chosen and rejected, which make pairs; write pairs = "
                "true."
            )
        if self.missing == "drop":
            raise ConfigError(
                "No table knows which samples a template is complete for; write missing='pad' to leave their "
                'slots without tokens, or leave them out by where=, such as "facts.has_report".'
            )

    @property
    def num_sequences(self) -> int:
        """Sequences of a sample (S): 2 of a pair."""
        return 2 if self.pairs else 1

    @property
    def depends_on(self) -> Sequence[str]:
        """Fields that the template may name."""
        return self.template.possible_fields if isinstance(self.template, Template) else ()

    @property
    def needs_partly(self) -> Collection[str]:
        """Fields that only turns with a condition name."""
        return self.template.optional_fields if isinstance(self.template, Template) else ()

    @property
    def split_at(self) -> int | None:
        """Tokens above which a conversation is split; None if none is."""
        return self.max_tokens if self.split_long else None

    def for_evaluation(self) -> Conversation:
        """Return the field with the first phrasing of each turn, where one would be drawn in each epoch."""
        if isinstance(self.template, Template) and self.template.varies:
            return replace(self, template=self.template.first())
        return self

    def bind(self, name: str, context: FieldContext) -> BoundField:
        """Bind the field to a selection."""
        if isinstance(self.template, Template):
            return BoundTemplate(name, self, self.template, context)
        return BoundConversation(name, self, context)

    @classmethod
    def present(cls, entry: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        """Return ids, mask, weights and the other entries of the processor."""
        return present_conversations(entry, arrays)


class BoundRendered(BoundField):
    """Conversations, bound to a selection: what stored ones and those of templates share."""

    spec: Conversation

    def _open_renderer(self, spec: Conversation, context: FieldContext) -> None:
        self._context, self._counters = context, context.counters
        self._original = Renderer.load(spec.processor)
        self._form: RenderedForm = self._original.form(spec.max_tokens, spec.max_images)
        self._arrays = ConversationArrays(
            self.name,
            self._form,
            num_sequences=spec.num_sequences,
            max_tokens=spec.max_tokens,
            pad_id=self._original.pad_id,
            is_packed=spec.packed,
            has_scores=spec.scores,
        )
        self._lock, self._local = threading.Lock(), threading.local()
        self._counts: PlannedCounts | None = None

    @property
    def digests(self) -> Sequence[str]:
        """Digest of the processor."""
        return [self._original.digest]

    def counted_by(self) -> list[CountedTemplate] | None:
        """Return the templates that make the conversations of each dataset; None if these are stored."""
        return None

    def token_counts(self, budget: TokenBudget) -> list[NDArray[np.int64]]:
        """Return what a budget charges for each row of each dataset, see `PlannedCounts.lengths`."""
        self._counts = self._counts or self._planned_counts()
        return self._counts.lengths(self.name, budget)

    def _planned_counts(self) -> PlannedCounts:
        entries = tuple(self._form.pictures)
        return PlannedCounts(self.spec, self._context, self._original, entries, self.counted_by())

    @property
    def is_packed(self) -> bool:
        """Whether the conversations of a micro-batch share one sequence."""
        return self.spec.packed

    def array_specs(self, slots: Slots) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        return self._arrays.specs(len(slots), self._planned(slots))

    def prepare(self, arrays: Arrays, slots: Slots) -> None:
        """Lay out the slots, and empty every one."""
        self._arrays.prepare(arrays, self._planned(slots))

    def blank(self, arrays: Arrays, slot: int | slice) -> None:
        """Make a slot look like one without a conversation; packed ones keep their planned length."""
        self._arrays.blank(arrays, slot)

    def example(self, arrays: Arrays) -> None:
        """Give the only slot a token."""
        arrays[f"{self.name}.length"][:] = 1

    def describe(self) -> dict[str, Any]:
        """Return what presenting needs."""
        return {
            "type": self.spec.type_name,
            "name": self.name,
            "pairs": self.spec.pairs,
            "tokens": list(self._form.tokens),
            "pictures": {one: list(entry.shape) for one, entry in self._form.pictures.items()},
            **({"scores": True} if self.spec.scores else {}),
            **self._describe_packed(),
        }

    def _describe_packed(self) -> dict[str, Any]:
        if not self.spec.packed:
            return {}
        has_grids = "image_grid_thw" in self._form.pictures
        mrope = self._original.mrope if has_grids else None
        return {"packed": True, "pad_id": self._original.pad_id, "mrope": mrope}

    def put(
        self,
        arrays: Arrays,
        slot: int,
        document: Any,
        members: Mapping[str, Any],
        span: Span | None = None,
    ) -> bool:
        """Render a conversation into its slot; return whether it fits.

        Args:
            arrays: Of the micro-batch.
            slot: The slot.
            document: The conversation in its stored form.
            members: Its pictures by name, as stored or of Pillow.
            span: The part of it that is the sample; None for all of it.

        Raises:
            RenderError: It is malformed, or cannot be rendered.
        """
        with self._counters.timed("render", 0, 1):
            stored = StoredConversation.parse(document, pairs=self.spec.pairs, scores=self.spec.scores)
            rendered = self._render(stored if span is None else stored.part(span), members)
        if rendered is None or not all(self._fits(one) for one in rendered):
            return False
        self._arrays.write(arrays, slot, rendered, stored.score)
        return True

    def _fits(self, rendered: Rendered) -> bool:
        form, most = self._form, self.spec.max_tokens
        if {*rendered.tokens} != {*form.tokens} or not rendered.pictures.keys() <= form.pictures.keys():
            raise RenderError("the processor returned other entries than for what it was tried with")
        for one, values in rendered.pictures.items():
            entry = form.pictures[one]
            if values.shape[1:] != entry.shape or values.dtype != np.dtype(entry.dtype):
                raise RenderError(
                    f"the processor returned {one} of another shape than for the pictures it was tried with"
                )
            if len(values) > entry.most_rows and not self.spec.packed:
                return False
        return len(rendered.ids) <= most

    def _render(self, stored: StoredConversation, members: Mapping[str, Any]) -> list[Rendered] | None:
        """Render each end of a conversation; None if one shows more pictures than may be."""
        spec = self.spec
        if spec.max_images is not None and max(map(len, stored.shown())) > spec.max_images:
            return None
        return stored.render(self._own(), members, train_on=spec.train_on)

    def _planned(self, slots: Slots) -> ConversationCounts | None:
        """Return the counts of each slot that the plan gives a sample; of a packed micro-batch."""
        if not self.spec.packed:
            return None
        assert self._counts is not None  # noqa: S101 - opened for it
        return slots.once(self.name, self._counts.gather)

    @property
    def too_long(self) -> str:
        """What a conversation that does not fit has too much of."""
        most = (
            ""
            if self.spec.max_images is None
            else f", or more pictures than max_images ({self.spec.max_images})"
        )
        return f"longer than max_tokens ({self.spec.max_tokens:,}){most}"

    def count_long(self) -> None:
        """Count a conversation that was left out because it is too long."""
        self._counters.add("long_conversations", num_items=1)

    def _own(self) -> Renderer:
        """Return this thread's renderer."""
        found: Renderer | None = getattr(self._local, "renderer", None)
        if found is None:
            with self._lock:
                found = self._local.renderer = self._original.copy()
        return found


class BoundConversation(BoundRendered, BoundMember):
    """Stored conversations, bound to a selection."""

    spec: Conversation

    def __init__(self, name: str, spec: Conversation, context: FieldContext) -> None:
        super().__init__(name, spec, context, spec.member, spec.max_bytes)
        self._open_renderer(spec, context)
        if spec.packed:
            self._counts = self._planned_counts()

    def check_counts(self) -> None:
        """Compare some of the counts with what the processor renders, see `PlannedCounts.check`."""
        if self._counts is not None:
            self._counts.check()

    def needed(self, shard: Shard, request: SlotRequest) -> Sequence[int]:
        """Return the conversation, and the pictures stored beside it."""
        found = list(super().needed(shard, request))
        names = [one for one in shard.index.field_names if PICTURE_NAME.fullmatch(one)] if found else []
        if self._form.pictures:
            numbers = (shard.find(request.row_in_shard, one) for one in names)
            found += [number for number in numbers if number is not None]
        return found

    def open(self, shard: Shard, request: SlotRequest, arrays: Arrays) -> SlotContent:
        """Begin a slot."""
        return _SlotConversation(self, shard, request, arrays, self.needed(shard, request))

    def span_of(self, request: SlotRequest) -> Span | None:
        """Return which messages of its conversation a sample is; None for all of them."""
        dataset = self._context.samples.datasets[request.component]
        if not isinstance(dataset, PartDataset):
            return None
        first, stop = dataset.samples.messages[request.table_row].tolist()
        return first, stop


class BoundTemplate(BoundRendered):
    """Conversations that a template makes, bound to a selection.

    Args:
        name: Name of the entry.
        spec: What to deliver.
        template: How they are made.
        context: The samples, and the fields that are already bound.

    Raises:
        ConfigError: The template names what the loader has not, or boxes that the model would see elsewhere.
    """

    is_derived = True

    def __init__(self, name: str, spec: Conversation, template: Template, context: FieldContext) -> None:
        super().__init__(name)
        self.spec, self._template = spec, template
        self._open_renderer(spec, context)
        has_pictures = bool(self._form.pictures)
        if template.images and not has_pictures:
            raise ConfigError(
                "The template shows images, and the processor or max_images=0 takes text alone."
            )
        self._values = TemplateValues(template, context, self._original)
        if spec.packed:
            self._counts = self._planned_counts()

    @property
    def digests(self) -> Sequence[str]:
        """Digests of the processor and of the tables of the columns."""
        return [*super().digests, *self._values.digests]

    @property
    def tables(self) -> Sequence[str]:
        """Names of the attached tables that the template reads."""
        return self._values.tables

    @property
    def renderer(self) -> Renderer:
        """Renderer of the conversations; of one thread."""
        return self._own()

    @property
    def planned(self) -> PlannedCounts | None:
        """Counts of the conversations, where a token budget charges for them."""
        return self._counts

    def counted_by(self) -> list[CountedTemplate]:
        """Return what decides the conversations of each dataset, see `TemplateValues.counted_by`."""
        return self._values.counted_by(self.name, self.spec.depends_on, self._context)

    def needed(self, shard: Shard, request: SlotRequest) -> Sequence[int]:  # noqa: ARG002
        """Return nothing: other fields read the sample."""
        return ()

    def open(self, shard: Shard, request: SlotRequest, arrays: Arrays) -> SlotContent:  # noqa: ARG002
        """Begin a slot."""
        return NoContent()

    def compose(
        self, component: int, row: int, draw: DrawKey, entries: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[Any]]:
        """Return the conversation of a sample in its stored form, and its pictures.

        Args:
            component: Of a blend; 0 without a blend.
            row: Row of its dataset's own table.
            draw: Key of its random choices.
            entries: Of the fields that the template names, as a transform gets them.

        Raises:
            IncompleteError: The sample lacks a value.
            ValueError: Turns of one role follow each other.
        """
        if self._template.draws == "sample":
            draw = DrawKey(0, 0, row, table_row=row)
        return self._values.compose(component, row, draw, entries)

    def derive(
        self, arrays: Arrays, slots: Slots, slot: int, entries: Mapping[str, Any]
    ) -> tuple[BadSampleReason, str] | None:
        """Make the conversation of a slot, and render it."""
        component, row = int(slots.components[slot]), int(slots.table_rows[slot])
        try:
            document, pictures = self.compose(component, row, slots.draw(slot), entries)
            shown = {str(place): one for place, one in enumerate(pictures)}
            is_put = self.put(arrays, slot, document, shown)
        except IncompleteError as error:
            if self.spec.missing == "error" or error.name in self._context.eased:
                return BadSampleReason.FIELD_MISSING, str(error)
            for name in (INCOMPLETE, f"{INCOMPLETE}.{error.name or 'when'}"):
                self._counters.add(name, num_items=1)
            return None
        except (RenderError, ValueError) as error:
            return BadSampleReason.DECODE_FAILED, str(error)
        if is_put:
            return None
        if self.spec.long == "error":
            return BadSampleReason.CONVERSATION_TOO_LONG, self.too_long
        self.count_long()
        return None


class _SlotConversation:
    """Conversation of one slot."""

    __slots__ = ("_arrays", "_field", "_payloads", "_request", "_shard", "fields")

    def __init__(
        self,
        bound: BoundConversation,
        shard: Shard,
        request: SlotRequest,
        arrays: Arrays,
        fields: Sequence[int],
    ) -> None:
        self._field, self._shard, self._request, self._arrays = bound, shard, request, arrays
        self.fields = fields
        self._payloads: dict[int, bytes] = {}

    def put(self, place: int, payload: NDArray[np.uint8], thread: ThreadState) -> None:
        """Keep the bytes until all have come."""
        thread.enter("decode", f"shard {self._shard.name}")
        self._payloads[place] = payload.tobytes()

    def close(self) -> None:
        """Render the conversation into its slot."""
        if not self._payloads:
            return
        bound, shard, number = self._field, self._shard, self.fields[0]
        try:
            document = json.loads(self._payloads[0])
        except (ValueError, RecursionError) as error:
            raise shard.bad(BadSampleReason.TEXT_UNREADABLE, number, type(error).__name__) from None
        names = {place: shard.field_name(self.fields[place]) for place in self._payloads}
        members = {names[place]: payload for place, payload in self._payloads.items() if place}
        try:
            span = bound.span_of(self._request)
            is_put = bound.put(self._arrays, self._request.slot, document, members, span)
        except RenderError as error:
            raise shard.bad(BadSampleReason.DECODE_FAILED, number, str(error)) from None
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            detail = f"{type(error).__name__} in a malformed conversation"
            raise shard.bad(BadSampleReason.TEXT_UNREADABLE, number, detail) from None
        if is_put:
            return
        if bound.spec.long == "error":
            raise shard.bad(BadSampleReason.CONVERSATION_TOO_LONG, number, bound.too_long)
        bound.count_long()
