"""Which attachment a packing process is converting, in a file that outlives the process.

A process that dies says nothing. Before each attachment it writes the position of that file in the study, and
takes the note back when all are converted; the job reads what is left when a study has failed, and knows
whether an attachment or the study did it (docs/adr/0154). No other process packs the study meanwhile.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardflow.packing.fragment import fragment_path
from shardflow.packing.workplace import write_plainly

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["AttachmentMark"]


@dataclass(frozen=True, slots=True)
class AttachmentMark:
    """The note of one study.

    Args:
        fragments: Folder of the fragments.
        sample_key: Key of the sample.
        task_digest: What its fragment depends on: a note of another task says nothing of this one.
    """

    fragments: Path
    sample_key: str
    task_digest: str

    def write(self, position: int) -> None:
        """Say that the file at a position of the study is converted from now on.

        Raises:
            StorageError: It cannot be written.
        """
        text = json.dumps({"task_digest": self.task_digest, "position": position})
        write_plainly(self._path, text.encode("ascii"))

    def clear(self) -> None:
        """Take the note back."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def read(self) -> int | None:
        """Return the position of the file that was under way; None if it was none."""
        # Cut where its writer died, or on a disk that is gone: then nobody knows, and the study answers.
        with suppress(OSError, ValueError, KeyError, TypeError):
            said = json.loads(self._path.read_bytes())
            if said["task_digest"] == self.task_digest:
                return int(said["position"])
        return None

    @property
    def _path(self) -> Path:
        return fragment_path(self.fragments, self.sample_key).with_suffix(".attaching")
