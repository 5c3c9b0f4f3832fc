"""Key-value stores through which processes that know nothing of each other meet."""

from asyncdist.store.base import DEFAULT_STORE_TIMEOUT_S, Store
from asyncdist.store.file_store import FileStore
from asyncdist.store.hash_store import HashStore
from asyncdist.store.prefix_store import PrefixStore
from asyncdist.store.tcp_store import TCPStore

__all__ = ["DEFAULT_STORE_TIMEOUT_S", "FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"]
