"""Which GPU a rank means: `device_id=` as torch's init_process_group takes it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from asyncdist.cuda import provider

__all__ = ["chosen_device"]


def chosen_device(device: Any, environ: Mapping[str, str] = os.environ) -> int | None:
    """The GPU's number that `device` says: an int, `"cuda:1"`, a device of torch or cupy; None for None.

    `"cuda"`, or torch's device without a number, is LOCAL_RANK's, modulo the number of GPUs. Raises TypeError for
    anything else, ValueError where there is no such GPU.
    """
    if device is None:
        return None
    number = _number(device)
    found = provider.find()
    if found is None:
        raise ValueError(f"device_id={device!r}: {provider.reason()}")
    count = found.runtime.device_count()
    if number is None:
        return int(environ.get("LOCAL_RANK", "0")) % count
    if not 0 <= number < count:
        raise ValueError(f"device_id={device!r}: there are {count} GPUs here")
    return number


def _number(device: Any) -> int | None:
    """What it says; None for whichever is this rank's."""
    if isinstance(device, int) and not isinstance(device, bool):
        return device
    if isinstance(device, str):
        kind, colon, number = device.partition(":")
        if kind == "cuda" and (number.isdigit() or not colon):
            return int(number) if colon else None
        raise ValueError(f"device_id={device!r}: write 'cuda' or 'cuda:1'")
    if getattr(device, "type", "cuda") != "cuda":
        raise ValueError(f"device_id={device!r}: groups are bound to GPUs only")
    for attribute in ("index", "id"):  # torch's and cupy's
        number = getattr(device, attribute, device)
        if number is None or (isinstance(number, int) and not isinstance(number, bool)):
            return number
    raise TypeError(f"device_id must be a GPU's number or a device, not {type(device).__name__}")
