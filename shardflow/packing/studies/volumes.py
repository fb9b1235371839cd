"""Volumes of a study in bricks: slices stream by, and one member holds the bricks of all.

Memory is that of one layer of bricks (16 slices by default) and of a spool of 64 MiB, whatever the size of
the series: encoded bricks wait in the spool, above its bound in an unnamed file, since they are stored in
another order than they come.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from shardflow.format.keys import volume_field
from shardflow.format.shard_files import naming_os_errors
from shardflow.format.volume_encoder import VolumeEncoder

if TYPE_CHECKING:
    from types import TracebackType

    from shardflow.packing.settings import VolumesConfig
    from shardflow.packing.sources.dicom.pixels import SliceForm
    from shardflow.packing.sources.dicom.stacks import Stack
    from shardflow.packing.studies.fragment import FragmentWriter

_SPOOL_BYTES: Final = 64 << 20
_WHAT: Final = "writing bricks to a temporary file"


class VolumeWriter:
    """Writer of one series in bricks, fed with its slices; a context manager.

    Args:
        writer: Of the study's fragment.
        number: Of the series in the study.
        stack: The series.
        form: Form of its slices.
        config: Settings of volumes.
    """

    def __init__(
        self, writer: FragmentWriter, number: int, stack: Stack, form: SliceForm, config: VolumesConfig
    ) -> None:
        self._writer = writer
        self._number = number
        shape, dtype = (len(stack.slices), stack.rows, stack.columns), np.dtype(form.dtype)
        with naming_os_errors(_WHAT):
            self._spool = tempfile.SpooledTemporaryFile(  # noqa: SIM115 - closed by __exit__
                max_size=_SPOOL_BYTES, dir=str(writer.folder)
            )
        self._encoder = VolumeEncoder(shape, dtype, brick_shape=config.brick_shape, spool=self._spool)
        self._slab = np.empty((self._encoder.slab_num_slices, *shape[1:]), dtype)
        self._num_slices, self._num_left = 0, shape[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spool.close()

    def add(self, pixels: NDArray[Any]) -> None:
        """Take the next slice, ``(rows, columns)`` or ``(rows, columns, 1)``.

        Raises:
            StorageError: The spool cannot be written.
        """
        self._slab[self._num_slices] = pixels.reshape(self._slab.shape[1:])
        self._num_slices += 1
        self._num_left -= 1
        if self._num_slices == len(self._slab) or not self._num_left:
            with naming_os_errors(_WHAT):
                self._encoder.add(self._slab[: self._num_slices])
            self._num_slices = 0

    def finish(self) -> None:
        """Write the member.

        Raises:
            StorageError: It cannot be written, or the spool not be read.
        """
        self._writer.add_volume(volume_field(self._number), self._encoder.finish())
