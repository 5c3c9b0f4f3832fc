"""What torch's entry points call: `import torch` registers the backend "asyncdist", and torchrun finds its rendezvous.

In workers of `asyncdist run` and `asyncdist.spawn`, `env://` of torch, its default, meets by the launcher's store.

A package of its own, as it imports nothing: `import torch` in a program that never asks for asyncdist pays for no more
than this file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

__all__ = ["register", "torchrun_handler"]


def register() -> None:
    """Register backend "asyncdist" for CPU tensors with torch.distributed. May be called again."""
    import torch.distributed as dist

    if dist.is_available() and "ASYNCDIST" not in dist.Backend._plugins:
        dist.Backend.register_backend("asyncdist", _create, extended_api=True, devices=["cpu"])
        module = import_module("torch.distributed.rendezvous")  # whose name in the package is that of a function
        handlers = getattr(module, "_rendezvous_handlers", {})  # no public name replaces one
        if "env" in handlers:
            handlers["env"] = partial(_meet, handlers["env"])


def _create(options: Any, backend_options: Any) -> Any:
    from asyncdist.torch.process_group import create

    return create(options)


def _meet(by_torch: Callable[..., Any], url: str, **options: Any) -> Any:
    """The rendezvous of `env://`; `by_torch` is torch's own."""
    if "ASYNCDIST_STORE" not in os.environ or "ASYNCDIST_JOB_ID" not in os.environ:
        return by_torch(url, **options)
    from asyncdist.torch.rendezvous import meet

    return meet(url, **options)


def torchrun_handler() -> Callable[[Any], Any]:
    """What makes the rendezvous of `torchrun --rdzv-backend asyncdist` of its parameters."""

    def handler(parameters: Any) -> Any:
        from asyncdist.torch.rendezvous import create_handler

        return create_handler(parameters)

    return handler
