"""Copies of GPU arrays to the host and back, for what keeps arrays as bytes. They block their thread."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Final

import numpy as np

from asyncdist.arrays.device import DeviceArray, device_flat
from asyncdist.arrays.host import Array
from asyncdist.cuda import Pinned, provider
from asyncdist.errors import DistBackendError
from asyncdist.gpu.streams import carried

PINNED_BYTES: Final = 16 << 20


class HostCopies(ExitStack):
    """Entered for some copies, which share a pinned buffer. Nothing of a GPU is touched before the first."""

    _pinned: Pinned | None = None

    def to_host(self, array: DeviceArray, name: str, first: int = 0, last: int | None = None) -> Array:
        """The bytes `first` to `last` of `array`, once its stream has come here. Raises ValueError for strides."""
        octets = np.empty((array.nbytes if last is None else last) - first, np.uint8)
        self._move(array, name, first, octets, out=True)
        return octets

    def to_device(self, array: DeviceArray, name: str, octets: Array) -> None:
        """Fill `array` with `octets`, uint8, by its stream. Raises ValueError for strides, and if it is read-only."""
        self._move(array, name, 0, octets, out=False)

    def _move(self, array: Any, name: str, first: int, octets: Array, *, out: bool) -> None:
        flat = device_flat(carried(array), writable=not out, name=name)
        found = provider.find()
        if found is None:
            raise DistBackendError(f"{array!r} cannot be copied: {provider.reason()}")
        runtime = found.runtime
        if self._pinned is None:
            self._pinned = self.enter_context(runtime.pinned(PINNED_BYTES))
        pinned, stream = self._pinned, runtime.external_stream(flat.stream or 0, flat.device)
        for start in range(0, octets.size, PINNED_BYTES):
            piece = octets[start : start + PINNED_BYTES]
            room, place = pinned.array[: piece.size], flat.pointer + first + start
            if out:
                runtime.copy(pinned.pointer, place, piece.size, stream)
                stream.synchronize()
                piece[...] = room
            else:
                room[...] = piece
                runtime.copy(place, pinned.pointer, piece.size, stream)
                stream.synchronize()
