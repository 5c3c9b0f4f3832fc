"""Checkpoints: arrays in a folder, each rank its part, there completely or not at all.

from asyncdist import checkpoint

saving = checkpoint.save({"weights": weights}, "/shared/run", state={"step": 7})
...                                    # training goes on: the arrays were copied at the call
await saving
found = await checkpoint.load("/shared/run", {"weights": weights})   # by any number of ranks
"""

from asyncdist.checkpoint.checkpoint import Loaded, Part, load, save
from asyncdist.checkpoint.files import CheckpointError

__all__ = ["CheckpointError", "Loaded", "Part", "load", "save"]
