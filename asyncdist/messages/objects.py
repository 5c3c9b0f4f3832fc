"""Point-to-point messages of objects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from asyncdist.arrays.host import human_bytes
from asyncdist.arrays.objects import GPU_META, OBJECT_META, encode
from asyncdist.collectives.arguments.items import decode_object
from asyncdist.errors import RemoteProtocolError
from asyncdist.messages.work import NOTHING, PairWork, PairWorkOwner, RecvWork, SendWork
from asyncdist.transport.protocol.operations import Receive, SendOp


class SendObjectsWork(SendWork):
    """A send of a list of objects, which are encoded when it is made. Raises as `objects.encode`."""

    __slots__ = ()

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        values: Sequence[Any],
        allow_pickle: bool,
        key: bytes,
        owner: PairWorkOwner,
        peer: int,
    ) -> None:
        if not isinstance(values, list | tuple):
            raise TypeError(f"object_list must be a list, not {type(values).__name__}")
        octets = encode(list(values), allow_pickle=allow_pickle)
        PairWork.__init__(self, loop, "send_object_list", octets.nbytes, owner, peer, withdrawable=True)
        self.message = SendOp(key, octets, OBJECT_META, self, None)


class RecvObjectsWork(RecvWork):
    """A receive of as many objects as a list has places; its result is the source rank."""

    __slots__ = ("_allow_pickle", "_max_bytes", "_places")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        places: list[Any],
        allow_pickle: bool,
        key: bytes,
        owner: PairWorkOwner,
        peer: int,
        number: Callable[[int], int] | None,
        max_bytes: int,
    ) -> None:
        if not isinstance(places, list):
            raise TypeError(f"object_list must be a list, not {type(places).__name__}")
        super().__init__(loop, "recv_object_list", NOTHING, key, owner, peer, number, withdrawable=True)
        self.message.view = None  # always ask
        self._max_bytes = max_bytes
        self._places = places
        self._allow_pickle = allow_pickle

    def allocate(self, token: object, source: int, nbytes: int, meta: bytes) -> memoryview:
        """Make room for what the message holds."""
        what = ""
        if meta != OBJECT_META:
            what = "an array, not objects"
            if meta.startswith(GPU_META):
                self._owner.refuse_gpu_array(source, meta)
        elif nbytes > self._max_bytes:
            what = f"objects of {human_bytes(nbytes)}, above max_bytes={human_bytes(self._max_bytes)}"
        if what:
            raise self._dropped(source, what)
        self._octets = np.empty(nbytes, np.uint8).data
        return self._octets

    def message_received(self, token: object, receive: Receive) -> None:
        """The message is here."""
        if self._done:
            return
        assert receive.source is not None  # the transport sets it before it reports
        try:
            values = decode_object(self._octets, receive.source, self._allow_pickle)
            if type(values) is not list or len(values) != len(self._places):
                count = f"{len(values)} objects" if type(values) is list else "something else than a list"
                raise self._dropped(receive.source, f"{count}, but object_list has {len(self._places)} places")
        except RemoteProtocolError as error:
            self._fail(RemoteProtocolError(f"{self.where}: {error}"))
        except Exception as error:  # another number of objects; or memory is short
            self._fail(error)
        else:
            self._places[:] = values
            super().message_received(token, receive)
