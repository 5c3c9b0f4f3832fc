"""Whom a rank reaches: it dials the others where they listen, when it is asked (`inspect.endpoint.NETWORK`).

Only what the job's ranks advertise is dialed.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from asyncdist.inspect.ask import EndpointAddress, speed_of
from asyncdist.inspect.endpoint import DIAL_S, NETWORK, SPEED
from asyncdist.transport.addresses import PeerAddress, list_interfaces
from asyncdist.transport.connections.reach import reach
from asyncdist.transport.mesh import Mesh

if TYPE_CHECKING:
    from asyncdist.world.world import World

DIALED: Final = 64
"""Ranks that one dials. Of a larger world these are one of each host, and the ranks of a host dial others."""


def network_of(world: World, question: bytes = NETWORK) -> dict[str, Any]:
    """What a rank says of the network; empty where its mesh dials nobody.

    `host_id`, `transport`, `ports`, `interfaces`, `listens` and `peers`: of each rank dialed its `rank`, the facts of
    its link, and `dials` (see `reach`), or `why` there is none. To the question how fast bytes come from an endpoint:
    `bytes_per_s`, or `error`.
    """
    mesh = world.mesh
    ranks = range(world.world_size)
    known = {rank: address for rank in ranks if (address := world.address_of(rank)) is not None}
    if question.startswith(SPEED):
        _, ip, port = question.decode().split()
        token = None if world.inspection is None else world.inspection.token
        if ip not in {ip for address in known.values() for ip, _ in address.endpoints}:
            return {"error": f"no rank advertises {ip}"}
        return asyncio.run(speed_of(EndpointAddress("", 0, b"", ((ip, int(port)),)), token))
    if not isinstance(mesh, Mesh):
        return {}
    peers = [
        (mesh.targets(known[rank]), {"rank": rank, **mesh.link_facts(rank)}) for rank in _dialed(world.rank, known)
    ]
    dials = iter(reach([target for (targets, _), _ in peers for target in targets], DIAL_S))
    config = mesh.config
    return {
        **advertised(known.get(world.rank)),
        "transport": config.transport,
        "ports": f"{config.ports[0]}-{config.ports[-1]}" if config.ports else "",
        "interfaces": [{"name": one.name, "ip": one.ip} for one in list_interfaces()],
        "peers": [{**facts, "why": why, "dials": [next(dials) for _ in targets]} for (targets, why), facts in peers],
    }


def advertised(address: PeerAddress | None) -> dict[str, Any]:
    """What the others know of where a rank listens."""
    if address is None:
        return {}
    return {"host_id": address.host_id, "listens": [{"ip": ip, "port": port} for ip, port in address.endpoints]}


def _dialed(own: int, known: dict[int, PeerAddress]) -> list[int]:
    others = [rank for rank in known if rank != own]
    if len(others) <= DIALED:
        return others
    hosts: dict[str, list[int]] = defaultdict(list)
    for rank in others:
        hosts[known[rank].host_id].append(rank)
    chosen = [ranks[own % len(ranks)] for ranks in hosts.values()]
    first = own % len(chosen)
    return sorted((chosen[first:] + chosen[:first])[:DIALED])
