"""First sample of a run as text, with what its loss counts marked, in a private file.

A wrong template or mask is seen at a glance, and in no number. The text is that of a patient, so it goes into
a file of the run folder that only its owner may read, where the settings ask for it; the log has its counts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from shardflow.logs import counted
from shardflow.storage import write_atomic

_LOGGER = logging.getLogger(__name__)

Pieces: TypeAlias = Sequence[tuple[str, float] | int]
"""Texts with their weight in the loss, and numbers of pictures, in the order of the model."""
FIRST_SAMPLE_NAME: Final = "first_sample.txt"
"""Name of the file in the run folder."""
_MOST_CHARACTERS: Final = 20_000
_HEAD: Final = (
    "First sample of the first step, as the model gets it. The loss counts what is between ⟦ and ⟧, with a "
    "weight where it is not 1.\n"
)


def write_first_sample(folder: Path, sample: Mapping[str, Pieces]) -> None:
    """Write the file, and log its counts.

    Args:
        folder: The run folder.
        sample: Pieces by the name of the sequence, such as both of a pair.

    Raises:
        StorageError: It cannot be written.
    """
    text = _HEAD + "".join(f"\n--- {name} ---\n{_marked(pieces)}\n" for name, pieces in sample.items())
    left_out = len(text) - _MOST_CHARACTERS
    if left_out > 0:
        half = _MOST_CHARACTERS // 2
        text = f"{text[:half]}\n--- {left_out:,} characters left out ---\n{text[-half:]}"
    write_atomic(folder / FIRST_SAMPLE_NAME, [text.encode()], replace=True, mode=0o600)
    pieces = [one for each in sample.values() for one in each]
    texts = [one for one in pieces if not isinstance(one, int)]
    num_learned = sum(len(text) for text, weight in texts if weight)
    _LOGGER.info(
        "the first sample is in %s: %s and %s, %d of them in the loss",
        FIRST_SAMPLE_NAME,
        counted(len(pieces) - len(texts), "picture"),
        counted(sum(len(text) for text, _ in texts), "character"),
        num_learned,
    )


def _marked(pieces: Pieces) -> str:
    return "".join(map(_marked_piece, pieces))


def _marked_piece(piece: tuple[str, float] | int) -> str:
    if isinstance(piece, int):
        return f"<picture {piece + 1}>"
    text, weight = piece
    if not weight:
        return text
    return f"⟦{text}⟧" if weight == 1 else f"⟦{weight:g}: {text}⟧"
