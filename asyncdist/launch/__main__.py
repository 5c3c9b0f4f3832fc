"""`python -m asyncdist.launch` is `asyncdist run` that passes `--local_rank=N`, as torch.distributed.launch does."""

from __future__ import annotations

import sys

from asyncdist.cli.run_command import run_command
from asyncdist_server.serving.sockets import open_standard_descriptors

if __name__ == "__main__":
    open_standard_descriptors()
    run_command.main(["--pass-local-rank", *sys.argv[1:]], prog_name="python -m asyncdist.launch")
