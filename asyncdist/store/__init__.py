"""Key-value stores through which processes that know nothing of each other meet."""

from asyncdist.store.base import DEFAULT_STORE_TIMEOUT_S, Store
from asyncdist.store.credentials import TLSConfig
from asyncdist.store.file_store import FileStore
from asyncdist.store.hash_store import HashStore
from asyncdist.store.lease import Lease, Lock
from asyncdist.store.member import MemberEvent, Membership
from asyncdist.store.prefix_store import PrefixStore
from asyncdist.store.request_store import WaitingClient
from asyncdist.store.tcp_store import TCPStore
from asyncdist.store.watch import Watch, WatchEvent

__all__ = [
    "DEFAULT_STORE_TIMEOUT_S",
    "FileStore",
    "HashStore",
    "Lease",
    "Lock",
    "MemberEvent",
    "Membership",
    "PrefixStore",
    "Store",
    "TCPStore",
    "TLSConfig",
    "WaitingClient",
    "Watch",
    "WatchEvent",
]
