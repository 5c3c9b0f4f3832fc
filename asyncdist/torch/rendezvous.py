"""How programs of torch meet by an asyncdist daemon, whose token and certificates are those of the environment.

`torchrun --rdzv-backend asyncdist --rdzv-endpoint HOST:PORT` has torch's own rendezvous. The agents agree through the
daemon, which none of them hosts, so that each of them may end first. Workers of `asyncdist run` meet by its store.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from typing import Any, Final

from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from asyncdist.torch.stores import Store
from asyncdist.world.init_method import parse_init_method

__all__ = ["create_handler", "meet"]

DEFAULT_PORT: Final = 29500
DEFAULT_TIMEOUT: Final = timedelta(minutes=5)

_meetings: Final = count()
"""All ranks meet equally often. Backends of torch must not find the keys of an earlier time."""


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


def meet(url: str, timeout: timedelta = DEFAULT_TIMEOUT, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """torch's rendezvous of `env://` in a worker of asyncdist's launcher: a store, the rank and the world size."""
    method = parse_init_method(url, -1, -1)
    prefix = f"torch/meeting {next(_meetings)}"
    store = Store(method.host, method.port, prefix, timeout, namespace=method.namespace)
    yield store, method.rank, method.world_size
    raise RuntimeError("env:// rendezvous: the ranks cannot meet again")
