"""What a batch says of one thing: its row, as it is in the engine now. See `batch` for what the rows mean."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from asyncdist_server.engine.clients import Client
from asyncdist_server.engine.namespace import Namespace


def value_rows(homes: dict[bytes, int], namespace: Namespace, keys: Iterable[bytes], first_row: int) -> list[Any]:
    """Return what the values of `keys` are now, and note in `homes` that the batch of `first_row` says so."""
    rows: list[Any] = []
    values, leased = namespace.values, namespace.leased
    for key in keys:
        value = values.get(key)
        if value is not None:
            homes[key] = first_row
            rows.append((key, value, leased[key].lease_id if key in leased else 0))
        elif homes.pop(key, None) is not None:
            rows.append((key, None, 0))
    return rows


def client_row(
    client_id: bytes, namespace: str | None, client: Client | None
) -> tuple[bytes, str | None, float | None]:
    """Return what is known of a client now, which is forgotten where it has no namespace."""
    return client_id, namespace, None if client is None else client.idle_since


def lease_row(namespace: Namespace, lease_id: int) -> tuple[int, float | None, bytes | None, float | None]:
    """Return what a lease is now."""
    lease = namespace.leases.get(lease_id)
    if lease is None:
        return lease_id, None, None, None
    return lease_id, lease.ttl_s, lease.owner if isinstance(lease.owner, bytes) else None, lease.idle_since


def hold_row(namespace: Namespace, prefix: bytes) -> tuple[bytes, float | None, None, Any, float | None]:
    """Return what a hold is now, but for who holds it."""
    hold = namespace.holds.get(prefix)
    if hold is None:
        return prefix, None, None, None, None
    job = hold.job
    return prefix, hold.linger_s, None, None if job is None else (job.name, job.least, job.most), hold.idle_since


def holder_row(namespace: Namespace, holder: tuple[bytes, int]) -> tuple[bytes, int, bool]:
    """Return whether a lease holds a prefix now; `holder` is prefix and lease id."""
    return *holder, holds(namespace, *holder)


def holds(namespace: Namespace, prefix: bytes, lease_id: int) -> bool:
    """Return whether a lease holds a prefix now."""
    hold, lease = namespace.holds.get(prefix), namespace.leases.get(lease_id)
    return hold is not None and lease in hold.leases


def history_row(namespace: Namespace, prefix: bytes) -> tuple[bytes, int | None, float | None]:
    """Return what a history is now, but for its events."""
    history = namespace.histories.get(prefix)
    return (prefix, None, None) if history is None else (prefix, history.floor, history.idle_since)
