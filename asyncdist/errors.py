"""The exception tree.

    DistError (RuntimeError)
    ├─ DistNetworkError              the network or a peer failed
    │   ├─ PeerLostError             .rank, .left; __cause__ says how it was noticed
    │   ├─ RemoteProtocolError       a peer sent bytes that break the protocol
    │   └─ ConnectTimeoutError       also a TimeoutError
    ├─ DistStoreError                the store failed or refused
    │   ├─ StoreTimeoutError         also a TimeoutError; .keys are those still missing
    │   ├─ StoreLimitError           a documented bound was exceeded
    │   ├─ QueueEmptyError           queue_pop(block=False) found nothing
    │   ├─ LeaseLostError            what it was bound to has ended: a lease, a lock, a membership
    │   └─ WatchCompactedError       a watch missed events that are no longer remembered
    ├─ DistBackendError              a backend (NCCL, CUDA, MPI) said no
    ├─ CollectiveError               an operation of a group failed
    │   ├─ CollectiveTimeoutError    also a TimeoutError; .missing are global ranks
    │   ├─ CollectiveMismatchError   two ranks asked for different things; the message shows both; .peer
    │   └─ GroupAbortedError         .reason; .rank that started it, where known
    ├─ RemoteError                   a function called on another rank raised; .rank, .kind, .traceback
    ├─ WaitTimeoutError              also a TimeoutError; Work.wait(timeout) gave up waiting, the operation goes on
    ├─ ClosedError                   you used something that is closed
    └─ LaunchError                   .exitcode, .rank of the first worker that failed

Wrong arguments are `TypeError` or `ValueError`, raised at the call before a byte moves. `DistError` is a
`RuntimeError` because torch.distributed's is, so that `except` clauses port. Ranks in errors are global ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "ClosedError",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "ConnectTimeoutError",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "GroupAbortedError",
    "LaunchError",
    "LeaseLostError",
    "PeerLostError",
    "QueueEmptyError",
    "RemoteError",
    "RemoteProtocolError",
    "StoreLimitError",
    "StoreTimeoutError",
    "WaitTimeoutError",
    "WatchCompactedError",
]


class DistError(RuntimeError):
    """Root of everything asyncdist raises on purpose, wrong arguments excepted."""


class DistNetworkError(DistError):
    """The network or a peer failed."""


class PeerLostError(DistNetworkError):
    """The connection to a peer ended while something still depended on it.

    `rank` is the peer's global rank; `left` says that it went in order, with a goodbye.
    """

    def __init__(self, message: str, rank: int, left: bool = False) -> None:
        super().__init__(message)
        self.rank = rank
        self.left = left


class RemoteProtocolError(DistNetworkError):
    """A peer, client or server sent bytes that break the protocol; only that connection is closed.

    Of an operation on objects: what a rank sent is none, or is pickled where that was not allowed; the group goes on.
    """


class ConnectTimeoutError(DistNetworkError, TimeoutError):
    """A connection was not established in time."""


class DistStoreError(DistError):
    """The store failed or refused a request."""


class StoreTimeoutError(DistStoreError, TimeoutError):
    """A store request expired; `keys` are those that were still missing."""

    def __init__(self, message: str, keys: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.keys = tuple(keys)


class StoreLimitError(DistStoreError):
    """A request exceeds one of the store's documented limits."""


class QueueEmptyError(DistStoreError):
    """`queue_pop(block=False)` found the queue empty."""


class LeaseLostError(DistStoreError):
    """A lease has ended, or may have: the store could not be reached in time. So has what was bound to it."""


class WatchCompactedError(DistStoreError):
    """A watch fell behind what the store remembers, or the store lost its data: look at the keys, and watch anew."""


class DistBackendError(DistError):
    """A backend library (NCCL, CUDA, MPI) reported a failure."""


class CollectiveError(DistError):
    """An operation of a group failed."""


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """An operation's deadline passed; `missing` are the global ranks that had not contributed, as far as known."""

    def __init__(self, message: str, missing: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class CollectiveMismatchError(CollectiveError):
    """Two ranks asked for different things under the same name; the message shows both sides.

    `peer` is the other side's global rank, where known.
    """

    def __init__(self, message: str, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class GroupAbortedError(CollectiveError):
    """The group was aborted; `reason` says why and `rank` who started it, where known."""

    def __init__(self, message: str, reason: str = "", rank: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.rank = rank


class RemoteError(DistError):
    """A function that was called on another rank raised an exception there.

    `rank` is that rank, `kind` the name of the exception's class, `traceback` its text, which is in the message, too.
    """

    def __init__(self, message: str, rank: int, kind: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.kind = kind
        self.traceback = traceback


class WaitTimeoutError(DistError, TimeoutError):
    """The time given to `Work.wait` was over; the operation goes on, and may be waited for again."""


class ClosedError(DistError):
    """The object was closed here, by us, before this call."""


class LaunchError(DistError):
    """A worker failed; `exitcode` and `rank` are those of the first failure."""

    def __init__(self, message: str, exitcode: int | None = None, rank: int | None = None) -> None:
        super().__init__(message)
        self.exitcode = exitcode
        self.rank = rank
