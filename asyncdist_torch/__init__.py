"""What torch's entry points call: `import torch` registers the backend "asyncdist", and torchrun finds its rendezvous.

A package of its own, as it imports nothing: `import torch` in a program that never asks for asyncdist pays for no more
than this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["register", "torchrun_handler"]


def register() -> None:
    """Register backend "asyncdist" for CPU tensors with torch.distributed. May be called again."""
    import torch.distributed as dist

    if dist.is_available() and "ASYNCDIST" not in dist.Backend._plugins:
        dist.Backend.register_backend("asyncdist", _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: Any) -> Any:
    from asyncdist.torch.process_group import create

    return create(options)


def torchrun_handler() -> Callable[[Any], Any]:
    """What makes the rendezvous of `torchrun --rdzv-backend asyncdist` of its parameters."""

    def handler(parameters: Any) -> Any:
        from asyncdist.torch.rendezvous import create_handler

        return create_handler(parameters)

    return handler
