"""The numbers of the store's native wire contract, which `messages` describes: operations, replies, events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = [
    "ADD",
    "APPEND",
    "CANCEL",
    "CANCELLED",
    "CHECK",
    "COMPACTED",
    "COMPARE_SET",
    "DELETE",
    "DELETE_NAMESPACE",
    "EVENT_DELETE",
    "EVENT_EXPIRE",
    "EVENT_SET",
    "GET",
    "GOODBYE",
    "GRANT",
    "HOLD",
    "INVALID",
    "JOIN",
    "KEEP_ALIVE",
    "LEASE_LOST",
    "LEAVE",
    "LIMIT",
    "LIST_KEYS",
    "LOCK",
    "MULTI_GET",
    "MULTI_SET",
    "MUTATIONS",
    "NAMESPACES",
    "NUM_KEYS",
    "OBSERVATIONS",
    "OK",
    "OPERATION_NAMES",
    "PING",
    "PROTOCOL",
    "QUEUE_LEN",
    "QUEUE_POP",
    "QUEUE_PUSH",
    "QUEUE_RETURN",
    "REFUSED",
    "REVOKE",
    "SET",
    "SET_LEASED",
    "STATUS",
    "STOPPING",
    "TIMEOUT",
    "UNLOCK",
    "WAIT",
    "WAITS",
    "WATCH",
]

# Operation codes. Small integers, so that msgpack spends one byte on them.
SET: Final = 1
GET: Final = 2
ADD: Final = 3
CHECK: Final = 4
WAIT: Final = 5
COMPARE_SET: Final = 6
DELETE: Final = 7
APPEND: Final = 8
MULTI_GET: Final = 9
MULTI_SET: Final = 10
NUM_KEYS: Final = 11
LIST_KEYS: Final = 12
QUEUE_PUSH: Final = 13
QUEUE_POP: Final = 14
QUEUE_LEN: Final = 15
QUEUE_RETURN: Final = 16
CANCEL: Final = 17
DELETE_NAMESPACE: Final = 18
PING: Final = 19
GOODBYE: Final = 20
GRANT: Final = 21
KEEP_ALIVE: Final = 22
REVOKE: Final = 23
SET_LEASED: Final = 24
HOLD: Final = 25
WATCH: Final = 26
LOCK: Final = 27
UNLOCK: Final = 28
JOIN: Final = 29
LEAVE: Final = 30
STATUS: Final = 31
WAITS: Final = 32
NAMESPACES: Final = 33

OPERATION_NAMES: Final[Mapping[int, str]] = {
    SET: "set",
    GET: "get",
    ADD: "add",
    CHECK: "check",
    WAIT: "wait",
    COMPARE_SET: "compare_set",
    DELETE: "delete_key",
    APPEND: "append",
    MULTI_GET: "multi_get",
    MULTI_SET: "multi_set",
    NUM_KEYS: "num_keys",
    LIST_KEYS: "list_keys",
    QUEUE_PUSH: "queue_push",
    QUEUE_POP: "queue_pop",
    QUEUE_LEN: "queue_len",
    QUEUE_RETURN: "queue_return",
    CANCEL: "cancel",
    DELETE_NAMESPACE: "delete_namespace",
    PING: "ping",
    GOODBYE: "goodbye",
    GRANT: "lease",
    KEEP_ALIVE: "keep_alive",
    REVOKE: "revoke",
    SET_LEASED: "set with lease",
    HOLD: "hold",
    WATCH: "watch",
    LOCK: "lock",
    UNLOCK: "unlock",
    JOIN: "join",
    LEAVE: "leave",
    STATUS: "status",
    WAITS: "waits",
    NAMESPACES: "namespaces",
}

MUTATIONS: Final = frozenset(
    {SET, ADD, COMPARE_SET, DELETE, APPEND, MULTI_SET, QUEUE_PUSH, QUEUE_POP, QUEUE_RETURN, DELETE_NAMESPACE}
    | {GRANT, REVOKE, SET_LEASED, HOLD, LOCK, UNLOCK, JOIN, LEAVE}
)
"""Operations whose replies the daemon remembers, and which a client names in `Hello.pending`."""

OBSERVATIONS: Final = (STATUS, WAITS, NAMESPACES, PING, GOODBYE)
"""What a client may ask that only looks: nothing of what is told depends on a change."""

# Reply codes. The value of OK is the operation's; of TIMEOUT the list of keys still missing (at most
# MAX_MISSING_REPORTED), or of a join that waits for a name a text for people; of all others a text for people.
OK: Final = 0
TIMEOUT: Final = 1
LIMIT: Final = 2  # a documented bound; nothing of the request was applied
INVALID: Final = 3  # the request makes no sense on the stored value; nothing was applied
CANCELLED: Final = 4  # withdrawn by CANCEL
PROTOCOL: Final = 5  # the bytes broke this contract; the connection is closed
REFUSED: Final = 6  # this client may not connect now (version, too many connections, superseded)
COMPACTED: Final = 7  # events from that revision on are no longer all remembered
LEASE_LOST: Final = 8  # there is no such lease (any more); nothing was applied
STOPPING: Final = 9  # of id 0: the daemon stops; connect again, here once it is back or to another

# What a watch tells of a key.
EVENT_SET: Final = 1
EVENT_DELETE: Final = 2
EVENT_EXPIRE: Final = 3  # deleted because the lease it was bound to expired
