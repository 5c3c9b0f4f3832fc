"""Collectives and messages whose sizes only the senders know: Python objects, and arrays of any shape and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncdist.concurrency.deadline import INHERIT, Timeout
from asyncdist.group.default_group import Group, peer_of, required_peer, resolve, root_of
from asyncdist.group.methods.objects import DEFAULT_MAX_TOTAL_BYTES
from asyncdist.group.methods.point_to_point import DEFAULT_MAX_BYTES
from asyncdist.work import Work


def all_gather_object(
    object_list: list[Any],
    obj: Any,
    group: Group = None,
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[list[Any]]:
    """Fill `object_list` (one place per rank) with everybody's `obj`.

    The result is `object_list`. None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset and
    numpy arrays and scalars arrive as they were sent, arrays as writable copies; everything else raises TypeError at
    the call, naming its type and place, unless every rank gave `allow_pickle=True` to `init_process_group`. Objects are
    encoded at the call, so they may change afterwards. Lists are written when the operation has ended well, and until
    then must not be changed.

    Objects encoded beyond `max_bytes` (1 GiB unless given) raise ValueError at the call; where a rank accepts less,
    CollectiveMismatchError there, and the group is aborted if it was a collective. Bytes that are no object, or pickled
    objects without that agreement, raise RemoteProtocolError that names the sender, on that rank alone.

    All ranks of the group call it, in the same order for each `tag`; tasks that call at the same time take different
    tags. `timeout` (seconds, a timedelta, None for no limit; by default the group's) bounds the operation.

    Raises TypeError and ValueError at the call for wrong arguments, before a byte moves; the other ranks raise
    CollectiveMismatchError then, and the group goes on. All ranks raise it where they differ in operation, size, dtype,
    reduction or root. CollectiveTimeoutError (`.missing`: ranks that did not come) and PeerLostError (`.rank`) end the
    group on all ranks: later calls raise GroupAbortedError.

    Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; cancelling a
    waiter ends only its waiting.
    """
    return resolve(group).all_gather_object(object_list, obj, max_bytes=max_bytes, tag=tag, timeout=timeout)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    *,
    group_dst: int | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[list[Any] | None]:
    """Fill rank `dst`'s `object_gather_list` (one place per rank) with everybody's `obj`.

    `object_gather_list` is None on the other ranks. `dst` is the group's first rank unless given.

    None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset and numpy arrays and scalars arrive
    as they were sent, arrays as writable copies; everything else raises TypeError at the call, naming its type and
    place, unless every rank gave `allow_pickle=True` to `init_process_group`. Objects are encoded at the call, so they
    may change afterwards. Lists are written when the operation has ended well, and until then must not be changed.

    Objects encoded beyond `max_bytes` (1 GiB unless given) raise ValueError at the call; where a rank accepts less,
    CollectiveMismatchError there, and the group is aborted if it was a collective. Bytes that are no object, or pickled
    objects without that agreement, raise RemoteProtocolError that names the sender, on that rank alone.

    `dst` is a global rank, also in a smaller group; `group_dst` is one of the group.

    All ranks of the group call it, in the same order for each `tag`; tasks that call at the same time take different
    tags. `timeout` (seconds, a timedelta, None for no limit; by default the group's) bounds the operation.

    Raises TypeError and ValueError at the call for wrong arguments, before a byte moves; the other ranks raise
    CollectiveMismatchError then, and the group goes on. All ranks raise it where they differ in operation, size, dtype,
    reduction or root. CollectiveTimeoutError (`.missing`: ranks that did not come) and PeerLostError (`.rank`) end the
    group on all ranks: later calls raise GroupAbortedError.

    Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; cancelling a
    waiter ends only its waiting.
    """
    found, root = root_of(group, "gather_object", tag, dst, group_dst, "dst", default=0)
    return found.gather_object(obj, object_gather_list, root, max_bytes=max_bytes, tag=tag, timeout=timeout)


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    *,
    group_src: int | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[list[Any]]:
    """Fill everybody's `object_list`, equally long on all ranks, with that of rank `src`.

    The result is `object_list`. `src` is the group's first rank unless given. `device` is accepted for torch's sake and
    not used.

    None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset and numpy arrays and scalars arrive
    as they were sent, arrays as writable copies; everything else raises TypeError at the call, naming its type and
    place, unless every rank gave `allow_pickle=True` to `init_process_group`. Objects are encoded at the call, so they
    may change afterwards. Lists are written when the operation has ended well, and until then must not be changed.

    Objects encoded beyond `max_bytes` (1 GiB unless given) raise ValueError at the call; where a rank accepts less,
    CollectiveMismatchError there, and the group is aborted if it was a collective. Bytes that are no object, or pickled
    objects without that agreement, raise RemoteProtocolError that names the sender, on that rank alone.

    `src` is a global rank, also in a smaller group; `group_src` is one of the group.

    All ranks of the group call it, in the same order for each `tag`; tasks that call at the same time take different
    tags. `timeout` (seconds, a timedelta, None for no limit; by default the group's) bounds the operation.

    Raises TypeError and ValueError at the call for wrong arguments, before a byte moves; the other ranks raise
    CollectiveMismatchError then, and the group goes on. All ranks raise it where they differ in operation, size, dtype,
    reduction or root. CollectiveTimeoutError (`.missing`: ranks that did not come) and PeerLostError (`.rank`) end the
    group on all ranks: later calls raise GroupAbortedError.

    Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; cancelling a
    waiter ends only its waiting.
    """
    del device  # objects travel through host memory
    found, root = root_of(group, "broadcast_object_list", tag, src, group_src, "src", default=0)
    return found.broadcast_object_list(object_list, root, max_bytes=max_bytes, tag=tag, timeout=timeout)


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    *,
    group_src: int | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[list[Any]]:
    """Put the r-th object of rank `src`'s input list in the first place of rank r's output list.

    The input list of other ranks is not used. `src` is the group's first rank unless given.

    The result is the output list, of which the other places stay as they are.

    None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset and numpy arrays and scalars arrive
    as they were sent, arrays as writable copies; everything else raises TypeError at the call, naming its type and
    place, unless every rank gave `allow_pickle=True` to `init_process_group`. Objects are encoded at the call, so they
    may change afterwards. Lists are written when the operation has ended well, and until then must not be changed.

    Objects encoded beyond `max_bytes` (1 GiB unless given) raise ValueError at the call; where a rank accepts less,
    CollectiveMismatchError there, and the group is aborted if it was a collective. Bytes that are no object, or pickled
    objects without that agreement, raise RemoteProtocolError that names the sender, on that rank alone.

    `src` is a global rank, also in a smaller group; `group_src` is one of the group.

    All ranks of the group call it, in the same order for each `tag`; tasks that call at the same time take different
    tags. `timeout` (seconds, a timedelta, None for no limit; by default the group's) bounds the operation.

    Raises TypeError and ValueError at the call for wrong arguments, before a byte moves; the other ranks raise
    CollectiveMismatchError then, and the group goes on. All ranks raise it where they differ in operation, size, dtype,
    reduction or root. CollectiveTimeoutError (`.missing`: ranks that did not come) and PeerLostError (`.rank`) end the
    group on all ranks: later calls raise GroupAbortedError.

    Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; cancelling a
    waiter ends only its waiting.
    """
    found, root = root_of(group, "scatter_object_list", tag, src, group_src, "src", default=0)
    return found.scatter_object_list(
        scatter_object_output_list, scatter_object_input_list, root, max_bytes=max_bytes, tag=tag, timeout=timeout
    )


def send_object_list(
    object_list: Sequence[Any],
    dst: int | None = None,
    group: Group = None,
    device: Any = None,
    *,
    group_dst: int | None = None,
    use_batch: bool = False,
    tag: int = 0,
    timeout: Timeout = None,
) -> Work[None]:
    """Send the objects of a list to rank `dst`, as one message; otherwise as `send`.

    `device` and `use_batch` are accepted for torch's sake and not used.

    None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset and numpy arrays and scalars arrive
    as they were sent, arrays as writable copies; everything else raises TypeError at the call, naming its type and
    place, unless every rank gave `allow_pickle=True` to `init_process_group`. Objects are encoded at the call, so they
    may change afterwards. Lists are written when the operation has ended well, and until then must not be changed.

    Objects encoded beyond `max_bytes` (1 GiB unless given) raise ValueError at the call; where a rank accepts less,
    CollectiveMismatchError there, and the group is aborted if it was a collective. Bytes that are no object, or pickled
    objects without that agreement, raise RemoteProtocolError that names the sender, on that rank alone.

    `dst` is a global rank, also in a smaller group; `group_dst` is one of the group.

    Matched by source and `tag` (an int of at least 0), in order. `timeout` (seconds or a timedelta; None, the default,
    is no limit) bounds the operation: CollectiveTimeoutError, and the message is withdrawn if no receive has matched
    it.

    Raises TypeError and ValueError at the call for wrong arguments, PeerLostError (`.rank`) where the other rank is
    lost; messages between other ranks go on.

    Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; when the last
    waiter is cancelled before message and receive have matched, it is withdrawn, and no other message is lost.
    """
    del device, use_batch  # objects travel through host memory, and there is one message only
    found = resolve(group)
    return found.pairs.send_objects(object_list, required_peer(found, dst, group_dst, "dst"), tag, timeout)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    *,
    group_src: int | None = None,
    use_batch: bool = False,
    max_bytes: int = DEFAULT_MAX_BYTES,
    tag: int = 0,
    timeout: Timeout = None,
) -> Work[int]:
    """Fill `object_list` with as many objects from rank `src` (None: from any).

    The result is the source's global rank. `device` and `use_batch` are accepted for torch's sake and not used.

    A message of arrays, too large, or of another number of objects raises CollectiveMismatchError and is dropped; the
    pair stays usable. Withdrawn like `recv`.

    None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset and numpy arrays and scalars arrive
    as they were sent, arrays as writable copies; everything else raises TypeError at the call, naming its type and
    place, unless every rank gave `allow_pickle=True` to `init_process_group`. Objects are encoded at the call, so they
    may change afterwards. Lists are written when the operation has ended well, and until then must not be changed.

    Objects encoded beyond `max_bytes` (1 GiB unless given) raise ValueError at the call; where a rank accepts less,
    CollectiveMismatchError there, and the group is aborted if it was a collective. Bytes that are no object, or pickled
    objects without that agreement, raise RemoteProtocolError that names the sender, on that rank alone.

    `src` is a global rank, also in a smaller group; `group_src` is one of the group.

    Matched by source and `tag` (an int of at least 0), in order. `timeout` (seconds or a timedelta; None, the default,
    is no limit) bounds the operation: CollectiveTimeoutError, and nothing is lost if no message has matched.

    Raises TypeError and ValueError at the call for wrong arguments, PeerLostError (`.rank`) where the other rank is
    lost; messages between other ranks go on.

    Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; when the last
    waiter is cancelled before message and receive have matched, it is withdrawn, and no other message is lost.
    """
    del device, use_batch  # as in `send_object_list`
    found = resolve(group)
    source = peer_of(found, src, group_src, "src")
    return found.pairs.receive_objects(object_list, source, tag, max_bytes, timeout)


def all_gather_array(
    array: Any,
    group: Group = None,
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
    max_total_bytes: int = DEFAULT_MAX_TOTAL_BYTES,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[list[Any]]:
    """Gather everybody's `array`, of any shape and dtype, on every rank.

    The result is the list of them, in rank order. Arrays may differ between ranks in shape and dtype; nothing is
    exchanged beforehand. Results are new numpy arrays. Where one is larger than `max_bytes` (1 GiB unless given), or
    all that come to a rank than `max_total_bytes` (8 GiB), that rank raises CollectiveMismatchError, which names the
    sender, and the group is aborted.

    Arrays are numpy's, torch's tensors on the CPU, and whatever exposes its memory (buffer protocol, DLPack), also a
    GPU's (`__cuda_array_interface__`), of any dtype of bools, integers, floats or complex numbers in native byte order;
    those of host memory may be strided. Until the Work is done they belong to the operation.

    All ranks of the group call it, in the same order for each `tag`; tasks that call at the same time take different
    tags. `timeout` (seconds, a timedelta, None for no limit; by default the group's) bounds the operation.

    Raises TypeError and ValueError at the call for wrong arguments, before a byte moves; the other ranks raise
    CollectiveMismatchError then, and the group goes on. All ranks raise it where they differ in operation, size, dtype,
    reduction or root. CollectiveTimeoutError (`.missing`: ranks that did not come) and PeerLostError (`.rank`) end the
    group on all ranks: later calls raise GroupAbortedError.

    Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; cancelling a
    waiter ends only its waiting.
    """
    return resolve(group).all_gather_array(
        array, max_bytes=max_bytes, max_total_bytes=max_total_bytes, tag=tag, timeout=timeout
    )


def gather_array(
    array: Any,
    dst: int | None = None,
    group: Group = None,
    *,
    group_dst: int | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    max_total_bytes: int = DEFAULT_MAX_TOTAL_BYTES,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[list[Any] | None]:
    """Gather everybody's `array`, of any shape and dtype, on rank `dst`.

    The result is the list of them, in rank order; None on the other ranks. `dst` is the group's first rank unless
    given.

    Arrays may differ between ranks in shape and dtype; nothing is exchanged beforehand. Results are new numpy arrays.
    Where one is larger than `max_bytes` (1 GiB unless given), or all that come to a rank than `max_total_bytes` (8
    GiB), that rank raises CollectiveMismatchError, which names the sender, and the group is aborted.

    `dst` is a global rank, also in a smaller group; `group_dst` is one of the group.

    Arrays are numpy's, torch's tensors on the CPU, and whatever exposes its memory (buffer protocol, DLPack), also a
    GPU's (`__cuda_array_interface__`), of any dtype of bools, integers, floats or complex numbers in native byte order;
    those of host memory may be strided. Until the Work is done they belong to the operation.

    All ranks of the group call it, in the same order for each `tag`; tasks that call at the same time take different
    tags. `timeout` (seconds, a timedelta, None for no limit; by default the group's) bounds the operation.

    Raises TypeError and ValueError at the call for wrong arguments, before a byte moves; the other ranks raise
    CollectiveMismatchError then, and the group goes on. All ranks raise it where they differ in operation, size, dtype,
    reduction or root. CollectiveTimeoutError (`.missing`: ranks that did not come) and PeerLostError (`.rank`) end the
    group on all ranks: later calls raise GroupAbortedError.

    Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; cancelling a
    waiter ends only its waiting.
    """
    found, root = root_of(group, "gather_array", tag, dst, group_dst, "dst", default=0)
    return found.gather_array(
        array, root, max_bytes=max_bytes, max_total_bytes=max_total_bytes, tag=tag, timeout=timeout
    )


def broadcast_array(
    array: Any = None,
    src: int | None = None,
    group: Group = None,
    *,
    group_src: int | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Give everybody rank `src`'s `array`, of any shape and dtype; None on the other ranks.

    The result is the array, on rank `src` the one given. `src` is the group's first rank unless given.

    The array travels in one piece; `broadcast` moves large ones of known shape in chunks, which is faster.

    Arrays may differ between ranks in shape and dtype; nothing is exchanged beforehand. Results are new numpy arrays.
    Where one is larger than `max_bytes` (1 GiB unless given), or all that come to a rank than `max_total_bytes` (8
    GiB), that rank raises CollectiveMismatchError, which names the sender, and the group is aborted.

    `src` is a global rank, also in a smaller group; `group_src` is one of the group.

    Arrays are numpy's, torch's tensors on the CPU, and whatever exposes its memory (buffer protocol, DLPack), also a
    GPU's (`__cuda_array_interface__`), of any dtype of bools, integers, floats or complex numbers in native byte order;
    those of host memory may be strided. Until the Work is done they belong to the operation.

    All ranks of the group call it, in the same order for each `tag`; tasks that call at the same time take different
    tags. `timeout` (seconds, a timedelta, None for no limit; by default the group's) bounds the operation.

    Raises TypeError and ValueError at the call for wrong arguments, before a byte moves; the other ranks raise
    CollectiveMismatchError then, and the group goes on. All ranks raise it where they differ in operation, size, dtype,
    reduction or root. CollectiveTimeoutError (`.missing`: ranks that did not come) and PeerLostError (`.rank`) end the
    group on all ranks: later calls raise GroupAbortedError.

    Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; cancelling a
    waiter ends only its waiting.
    """
    found, root = root_of(group, "broadcast_array", tag, src, group_src, "src", default=0)
    return found.broadcast_array(array, root, max_bytes=max_bytes, tag=tag, timeout=timeout)


def scatter_array(
    arrays: Sequence[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    *,
    group_src: int | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    max_total_bytes: int = DEFAULT_MAX_TOTAL_BYTES,
    tag: int = 0,
    timeout: Timeout = INHERIT,
) -> Work[Any]:
    """Give rank r the r-th of rank `src`'s `arrays`, of any shapes and dtypes; None on the other ranks.

    The result is this rank's array. `src` is the group's first rank unless given.

    Arrays may differ between ranks in shape and dtype; nothing is exchanged beforehand. Results are new numpy arrays.
    Where one is larger than `max_bytes` (1 GiB unless given), or all that come to a rank than `max_total_bytes` (8
    GiB), that rank raises CollectiveMismatchError, which names the sender, and the group is aborted.

    `src` is a global rank, also in a smaller group; `group_src` is one of the group.

    Arrays are numpy's, torch's tensors on the CPU, and whatever exposes its memory (buffer protocol, DLPack), also a
    GPU's (`__cuda_array_interface__`), of any dtype of bools, integers, floats or complex numbers in native byte order;
    those of host memory may be strided. Until the Work is done they belong to the operation.

    All ranks of the group call it, in the same order for each `tag`; tasks that call at the same time take different
    tags. `timeout` (seconds, a timedelta, None for no limit; by default the group's) bounds the operation.

    Raises TypeError and ValueError at the call for wrong arguments, before a byte moves; the other ranks raise
    CollectiveMismatchError then, and the group goes on. All ranks raise it where they differ in operation, size, dtype,
    reduction or root. CollectiveTimeoutError (`.missing`: ranks that did not come) and PeerLostError (`.rank`) end the
    group on all ranks: later calls raise GroupAbortedError.

    Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; cancelling a
    waiter ends only its waiting.
    """
    found, root = root_of(group, "scatter_array", tag, src, group_src, "src", default=0)
    return found.scatter_array(
        arrays, root, max_bytes=max_bytes, max_total_bytes=max_total_bytes, tag=tag, timeout=timeout
    )
