"""Arrays of the conversations of a micro-batch: a row for each, padded, or one packed sequence of them all.

In a packed sequence positions begin at 0 in each conversation, from which attention of transformers knows
where one ends; labels leave out the first token of each, which the token before it, of another conversation,
would predict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.fields.conversations.rendering import Rendered, RenderedForm, RenderError
from shardflow.fields.field import Arrays, ArraySpec
from shardflow.format.counts import ConversationCounts

IGNORED_LABEL: Final = -100
"""Label of a token that is not predicted, as losses of torch and transformers know it."""


class ConversationArrays:
    """Layout of the arrays of a field of conversations, and what is written into them.

    Args:
        name: Of the field, and the beginning of the arrays' names.
        form: What the processor returns.
        num_sequences: Sequences of a sample (S): 2 of a pair.
        max_tokens: Most tokens of a sequence.
        pad_id: Id of a token of padding.
        is_packed: Whether all sequences of a micro-batch are one row.
        has_scores: Whether each sample has a score.
    """

    def __init__(
        self,
        name: str,
        form: RenderedForm,
        *,
        num_sequences: int,
        max_tokens: int,
        pad_id: int,
        is_packed: bool,
        has_scores: bool,
    ) -> None:
        self._name, self._form = name, form
        self._num_sequences, self._max_tokens, self._pad_id = num_sequences, max_tokens, pad_id
        self._is_packed, self._has_scores = is_packed, has_scores

    def specs(self, num_slots: int, planned: ConversationCounts | None) -> list[ArraySpec]:
        """Name the arrays of a micro-batch.

        Args:
            num_slots: Its slots (B).
            planned: Counts of each slot, where it is packed.
        """
        name, places = self._name, (num_slots, self._num_sequences)
        scores = [ArraySpec.of(f"{name}.score", np.float32, num_slots)] if self._has_scores else []
        if planned is not None:
            num_tokens = int(self._of_sequences(planned.tokens).sum())
            return [
                ArraySpec.of(f"{name}.ids.data", np.int64, num_tokens),
                ArraySpec.of(f"{name}.weights.data", np.float32, num_tokens),
                *(ArraySpec.of(f"{name}.{one}.data", np.int64, num_tokens) for one in self._form.tokens),
                ArraySpec.of(f"{name}.start", np.int64, *places),
                ArraySpec.of(f"{name}.planned", np.int64, *places),
                ArraySpec.of(f"{name}.length", np.int64, *places),
                *scores,
                *self._of_pictures(
                    places, {one: int(self._of_sequences(rows).sum()) for one, rows in planned.rows.items()}
                ),
            ]
        tokens = *places, self._max_tokens
        most = {one: math.prod(places) * entry.most_rows for one, entry in self._form.pictures.items()}
        return [
            ArraySpec.of(f"{name}.ids", np.int64, *tokens),
            ArraySpec.of(f"{name}.weights", np.float32, *tokens),
            ArraySpec.of(f"{name}.length", np.int64, *places),
            *(ArraySpec.of(f"{name}.{one}", np.int64, *tokens) for one in self._form.tokens),
            *scores,
            *self._of_pictures(places, most),
        ]

    def _of_pictures(self, places: tuple[int, int], rows: Mapping[str, int]) -> list[ArraySpec]:
        name, specs = self._name, []
        for one, entry in self._form.pictures.items():
            specs.append(ArraySpec.of(f"{name}.{one}.data", entry.dtype, rows[one] * math.prod(entry.shape)))
            specs.append(ArraySpec.of(f"{name}.{one}.start", np.int64, *places))
            specs.append(ArraySpec.of(f"{name}.{one}.rows", np.int64, *places))
        return specs

    def _of_sequences(self, counts: NDArray[Any]) -> NDArray[Any]:
        """Return the counts of the sequences that samples have, ``(B, S)`` of ``(B, 2)``."""
        return counts[:, : self._num_sequences]

    def prepare(self, arrays: Arrays, planned: ConversationCounts | None) -> None:
        """Lay out the slots, and empty every one.

        Args:
            arrays: Of the micro-batch.
            planned: As of `specs`.
        """
        name = self._name
        for one, entry in self._form.pictures.items():
            starts = arrays[f"{name}.{one}.start"]
            rows = np.full(starts.shape, entry.most_rows)
            if planned is not None:
                rows = self._of_sequences(planned.rows[one]).astype(np.int64)
            starts[:] = (np.cumsum(rows) - rows.reshape(-1)).reshape(starts.shape)
        if planned is not None:
            tokens = self._of_sequences(planned.tokens).astype(np.int64)
            arrays[f"{name}.planned"][:] = tokens
            arrays[f"{name}.start"][:] = (np.cumsum(tokens) - tokens.reshape(-1)).reshape(tokens.shape)
        self.blank(arrays, slice(None))

    def blank(self, arrays: Arrays, slot: int | slice) -> None:
        """Make a slot look like one without a conversation; packed ones keep their planned length."""
        name, fillers = self._name, {"ids": self._pad_id, "weights": 0}
        for one, filler in (fillers | dict.fromkeys(self._form.tokens, 0)).items():
            if not self._is_packed:
                arrays[f"{name}.{one}"][slot] = filler
                continue
            start, planned = arrays[f"{name}.start"][slot], arrays[f"{name}.planned"][slot]
            first = int(start.reshape(-1)[0]) if start.size else 0
            arrays[f"{name}.{one}.data"][first : first + int(planned.sum())] = filler
        arrays[f"{name}.length"][slot] = 0
        if self._has_scores:
            arrays[f"{name}.score"][slot] = 0
        for one in self._form.pictures:
            arrays[f"{name}.{one}.rows"][slot] = 0

    def write(self, arrays: Arrays, slot: int, rendered: Sequence[Rendered], score: float | None) -> None:
        """Write a sample into its slot.

        Args:
            arrays: Of the micro-batch.
            slot: The slot.
            rendered: Each of its sequences.
            score: Its score, where samples have one.

        Raises:
            RenderError: It has another size than the plan of a packed micro-batch counted with.
        """
        name = self._name
        if self._is_packed:
            self._check_planned(arrays, slot, rendered)
        if self._has_scores:
            arrays[f"{name}.score"][slot] = score
        for place, one in enumerate(rendered):
            length = len(one.ids)
            for token, values in {"ids": one.ids, "weights": one.weights, **one.tokens}.items():
                if self._is_packed:
                    start = int(arrays[f"{name}.start"][slot, place])
                    arrays[f"{name}.{token}.data"][start : start + length] = values
                else:
                    arrays[f"{name}.{token}"][slot, place, :length] = values
            for picture, values in one.pictures.items():
                start = int(arrays[f"{name}.{picture}.start"][slot, place])
                data = arrays[f"{name}.{picture}.data"].reshape(-1, *values.shape[1:])
                data[start : start + len(values)] = values
                arrays[f"{name}.{picture}.rows"][slot, place] = len(values)
            arrays[f"{name}.length"][slot, place] = length

    def _check_planned(self, arrays: Arrays, slot: int, rendered: Sequence[Rendered]) -> None:
        name = self._name
        planned = arrays[f"{name}.planned"][slot].tolist()
        is_same = [len(one.ids) for one in rendered] == planned
        for picture, entry in self._form.pictures.items():
            starts = arrays[f"{name}.{picture}.start"].reshape(-1)
            end = len(arrays[f"{name}.{picture}.data"]) // max(1, math.prod(entry.shape))
            bounds = np.append(starts, end)
            first = slot * len(rendered)
            room = np.diff(bounds[first : first + len(rendered) + 1]).tolist()
            is_same &= [len(one.pictures.get(picture, ())) for one in rendered] == room
        if not is_same:
            raise RenderError("it has another number of tokens or pictures than was counted")


def present_conversations(entry: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
    """Return the entries of a batch, see `shardflow.Conversation`.

    Args:
        entry: What the field described.
        arrays: Of the batch.
    """
    name = entry["name"]
    found = _present_pictures(entry, arrays)
    if "scores" in entry:
        found[f"{name}_score"] = arrays[f"{name}.score"]
    present = _present_packed if "packed" in entry else _present_padded
    return present(entry, arrays, found) | found


def _present_padded(entry: Mapping[str, Any], arrays: Arrays, _: Mapping[str, Any]) -> dict[str, Any]:
    name = entry["name"]
    lengths = arrays[f"{name}.length"]
    longest = max(1, int(lengths.max(initial=0)))
    place = slice(None) if entry["pairs"] else 0

    def shown(array: NDArray[Any]) -> NDArray[Any]:
        found: NDArray[Any] = array[:, place, :longest]
        return found

    mask = np.arange(longest) < lengths[:, :, None]
    return {
        name: shown(arrays[f"{name}.ids"]),
        f"{name}_mask": shown(mask.astype(np.uint8)),
        f"{name}_weights": shown(arrays[f"{name}.weights"]),
        **{f"{name}_{one}": shown(arrays[f"{name}.{one}"]) for one in entry["tokens"]},
    }


def _present_packed(entry: Mapping[str, Any], arrays: Arrays, pictures: Mapping[str, Any]) -> dict[str, Any]:
    name = entry["name"]
    planned, lengths = arrays[f"{name}.planned"].reshape(-1), arrays[f"{name}.length"].reshape(-1)
    num_tokens = int(planned.sum())
    # A micro-batch without samples has a token, so that a model can run on it.
    sizes = planned[planned > 0] if num_tokens else np.ones(1, np.int64)
    cuts = np.append(0, np.cumsum(sizes))
    total = int(cuts[-1])
    position = np.arange(total) - np.repeat(cuts[:-1], sizes)
    segment = np.zeros(total, np.int64)
    is_token = np.zeros(total, np.uint8)
    if num_tokens:
        segment[:] = np.repeat(np.arange(len(planned)), planned)
        is_token[:] = position < np.repeat(lengths, planned)

    def row(of: str, filler: int) -> NDArray[Any]:
        data = arrays[f"{name}.{of}.data"]
        return (data if num_tokens else np.full(1, filler, data.dtype))[None]

    ids, weights = row("ids", entry["pad_id"]), row("weights", 0).copy()
    weights[:, position == 0] = 0
    positions = position[None]
    if entry["mrope"] is not None:
        token, merge = entry["mrope"]
        grid = pictures[f"{name}_image_grid_thw"]
        positions = np.concatenate([positions, _with_grids(ids[0], position, grid, token, merge)])[:, None]
    return {
        name: ids,
        f"{name}_mask": is_token[None],
        f"{name}_weights": weights,
        f"{name}_labels": np.where(weights > 0, ids, IGNORED_LABEL),
        f"{name}_position_ids": positions,
        f"{name}_segment_ids": segment[None],
        f"{name}_cu_seqlens": cuts.astype(np.int32),
        **{f"{name}_{one}": row(one, 0) for one in entry["tokens"]},
    }


def _present_pictures(entry: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
    """Return the entries of the pictures of a batch, one picture after another."""
    name, found = entry["name"], {}
    for one, shape in entry["pictures"].items():
        starts, rows = arrays[f"{name}.{one}.start"], arrays[f"{name}.{one}.rows"]
        data = arrays[f"{name}.{one}.data"].reshape(-1, *shape)
        pairs = zip(starts.reshape(-1).tolist(), rows.reshape(-1).tolist(), strict=True)
        pieces = [data[start : start + count] for start, count in pairs if count]
        found[f"{name}_{one}"] = np.concatenate(pieces) if pieces else data[:0]
        offsets = np.append(0, np.cumsum(rows.sum(axis=1)))
        found[f"{name}_{one}_offsets"] = offsets.astype(np.int64)
    return found


def _with_grids(
    ids: NDArray[np.int64], position: NDArray[np.int64], grid: NDArray[np.int64], token: int, merge: int
) -> NDArray[np.int64]:
    """Return positions in time, rows and columns, ``(3, T)``, as Qwen2-VL and Qwen2.5-VL count them.

    A picture takes as many positions as its longer side has tokens, whatever the number of its tokens.

    Args:
        ids: ``(T,)``.
        position: ``(T,)`` place in the conversation.
        grid: ``(N, 3)`` patches of each picture in time, rows and columns.
        token: Id of a token of a picture.
        merge: Patches on the side of a token.
    """
    places = np.flatnonzero(ids == token)
    inside = grid // np.array([1, merge, merge])
    sizes = inside.prod(axis=1)
    advance = np.ones(len(ids), np.int64)
    advance[places] = 0
    advance[places[np.cumsum(sizes) - 1]] = inside[:, 1:].max(axis=1, initial=0)
    before = np.cumsum(advance) - advance
    base = before - np.repeat(
        before[position == 0], np.diff(np.append(np.flatnonzero(position == 0), len(ids)))
    )
    found = np.repeat(base[None], 3, axis=0)
    if len(inside):
        steps = [np.indices(tuple(one)).reshape(3, -1) for one in inside.tolist()]
        found[:, places] += np.concatenate(steps, axis=1)
    return found
