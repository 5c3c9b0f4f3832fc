"""The ranks of a torch job: a process that has imported torch forks them, and each runs the cases it is told to.

As a program it is that process. A line of its input is a name of `torch_cases` or `torch_training` and arguments, as
JSON: all ranks run that case. A line of output has what each rank said of it, nothing where all went well.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from typing import Any, TextIO

from torch_kit import clean_environment

__all__ = ["TorchWorld"]


class TorchWorld:
    """A world of torch.distributed with backend "asyncdist", as a test uses it; it begins with the first case."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._process: subprocess.Popen[str] | None = None

    def run(self, case: str, *arguments: Any) -> None:
        """Run a case on all ranks. AssertionError with what went wrong on each; then the next case has a new world."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(self.size)],
                env={**clean_environment(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([case, *arguments]) + "\n")
        self._process.stdin.flush()
        said = json.loads(self._process.stdout.readline() or '["the process has ended"]')
        if any(said):
            self.close()
            raise AssertionError("\n".join(f"rank {rank}: {text}" for rank, text in enumerate(said) if text))

    def close(self) -> None:
        """End the world."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def be_rank(rank: int, size: int, directory: str, cases: int, answers: int) -> None:
    """One rank: run what comes, and say how it went."""
    from datetime import timedelta

    import torch.distributed as dist
    import torch_cases
    import torch_training

    dist.init_process_group(
        "asyncdist",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=30),
    )
    with os.fdopen(cases) as told, os.fdopen(answers, "w") as answer:
        for line in told:
            name, *arguments = json.loads(line)
            try:
                case = getattr(torch_cases, name, None) or getattr(torch_training, name)
                case(rank, size, *arguments)
            except BaseException:
                said = traceback.format_exc()
            else:
                said = ""
            answer.write(json.dumps(said) + "\n")
            answer.flush()
            if said:
                os._exit(1)
    dist.destroy_process_group()


def main(size: int) -> None:
    """Fork the ranks, and pass on cases and answers."""
    import torch
    import torch_training  # noqa: F401 - once for all ranks, with torch_cases

    torch.set_num_threads(1)
    ranks: list[tuple[TextIO, TextIO]] = []
    with tempfile.TemporaryDirectory() as directory:
        for rank in range(size):
            cases, answers = os.pipe(), os.pipe()
            if not os.fork():
                for told, answered in ranks:
                    told.close()
                    answered.close()
                os.close(cases[1])
                os.close(answers[0])
                sys.stdin.close()
                os.dup2(2, 1)  # what a case prints is no answer
                be_rank(rank, size, directory, cases[0], answers[1])
                os._exit(0)
            os.close(cases[0])
            os.close(answers[1])
            ranks.append((os.fdopen(cases[1], "w"), os.fdopen(answers[0])))
        for line in sys.stdin:
            for told, _ in ranks:
                with contextlib.suppress(BrokenPipeError):
                    told.write(line)
                    told.flush()
            said = [json.loads(answered.readline() or '"the rank has ended"') for _, answered in ranks]
            print(json.dumps(said), flush=True)
        for told, _ in ranks:
            told.close()
        for _ in ranks:
            os.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]))
