"""Why a neighbor cannot be measured here, in a few words; None where it can."""

from __future__ import annotations

import importlib
import importlib.util
import shutil


def missing_module(*names: str) -> str | None:
    """Return "not installed" with the first missing module's name, None when all are there."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            return f"not installed: {name}"
    return None


def missing_asyncdist(*functions: str) -> str | None:
    """Why asyncdist cannot be measured, or None; ``functions`` are what it must offer besides."""
    try:
        module = importlib.import_module("asyncdist")
    except ImportError as error:
        return f"not importable: asyncdist: {error}"
    absent = [name for name in ("init_process_group", *functions) if not hasattr(module, name)]
    return f"not available: asyncdist.{absent[0]}" if absent else None


def missing_torch() -> str | None:
    """Why torch cannot be measured, or None."""
    return missing_module("torch")


def missing_mpi() -> str | None:
    """Why Open MPI cannot be measured, or None."""
    if shutil.which("mpirun") is None:
        return "not installed: mpirun"
    return missing_module("mpi4py")


def missing_xoscar() -> str | None:
    """Why xoscar cannot be measured, or None."""
    return missing_module("xoscar")
