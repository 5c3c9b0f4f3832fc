"""The rendezvous of `torchrun --rdzv-backend asyncdist --rdzv-endpoint HOST:PORT`: torch's own, by an asyncdist daemon.

The agents agree through the daemon, which none of them hosts, so that each of them may end first. The daemon's token
and certificates are those of the environment.
"""

from __future__ import annotations

from typing import Any, Final

from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from asyncdist.torch.stores import Store

__all__ = ["create_handler"]

DEFAULT_PORT: Final = 29500


class DaemonRendezvousBackend(C10dRendezvousBackend):  # type: ignore[misc] # torch is not typed here
    """torch's own, by the name that torchrun was given."""

    @property
    def name(self) -> str:
        return "asyncdist"


def create_handler(parameters: Any) -> dynamic_rendezvous.DynamicRendezvousHandler:
    """Make the handler of torch's `RendezvousParameters`. What the agents write goes when the last of them is gone."""
    host, port = parse_rendezvous_endpoint(parameters.endpoint, DEFAULT_PORT)
    store = Store(host, port, f"torchrun/{parameters.run_id}")
    backend = DaemonRendezvousBackend(store, parameters.run_id)
    return dynamic_rendezvous.create_handler(store, backend, parameters)
