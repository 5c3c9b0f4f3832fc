"""What `asyncdist why` says of each program of `hang_programs`, with its lines to be filled in."""

from __future__ import annotations

from pathlib import Path

import hang_programs

PROGRAM = Path(hang_programs.__file__)

NOT_CALLED = "Rank {0} has not called all_reduce #1 of group default, in which ranks {1} wait at {{waits}}: "
SENTENCES = {
    "never_calls": NOT_CALLED.format(2, "0 and 1") + "it sleeps in asyncio.sleep at {culprit} (never_calls).",
    "calls_something_else": "Ranks differ in call #1 of group default: "
    "rank 2 called broadcast (root 0, float64) at {culprit}, "
    "and ranks 0 and 1 called all_reduce (ReduceOp.SUM, float64) at {waits}.",
    "groups_in_different_order": "Deadlock of ranks 0 and 1: "
    "rank 0 waits in all_reduce #0 of group default/1 at {rank 0} for rank 1; "
    "rank 1 waits in all_reduce #0 of group default/2 at {rank 1} for rank 0.",
    "sends_that_cross": "Deadlock of ranks 0 and 1: "
    "rank 0 waits in send of 32 MiB to rank 1 at {rank}, which rank 1 has not received; "
    "rank 1 waits in send of 32 MiB to rank 0 at {rank}, which rank 0 has not received.",
    "tasks_that_wait_for_each_other": "Deadlock of ranks 0 and 1: "
    "rank 0 waits in all_reduce #0 of group default/1 at {rank 0} for rank 1; "
    "rank 1 waits in get of 'ready' of the store at {rank 1}, which rank 0 would set at {key}.",
    "computes": NOT_CALLED.format(1, "0 and 2") + "it computes at {culprit} (_spin.<locals>.<genexpr>).",
    "sleeps": NOT_CALLED.format(1, "0 and 2") + "it sleeps in time.sleep at {culprit} (sleeps).",
    "is_stopped": NOT_CALLED.format(1, "0 and 2") + "its process is stopped, by SIGSTOP or a debugger.",
    "is_killed": "Rank 1 is lost: the connection was closed without a goodbye (it failed, was killed, broke off, or "
    "ended without destroy_process_group(): see its own output). It had not called all_reduce #1 of group default, "
    "in which ranks 0 and 2 waited at {waits}.",
    "left_early": "Rank 1 has left without calling all_reduce #1 of group default, "
    "in which ranks 0 and 2 waited at {waits}.",
    "wrong_tag": "Rank 0 receives from rank 1 with tag 5 at {waits}, "
    "but rank 1 has sent with tag 6 at {culprit}, which rank 0 does not receive.",
    "key_never_set": "Rank 1 waits for the key 'config' of the store (get at {culprit}), which nobody has set; "
    "ranks 0 and 2 wait in barrier #1 of group default at {waits} for rank 1.",
    "two_roots": "Ranks differ in call #1 of group default: rank 2 called broadcast (root 1, float64) at {all}, "
    "and ranks 0 and 1 called broadcast (root 0, float64) at {all}.",
}
PROVEN = {"groups_in_different_order", "sends_that_cross", "tasks_that_wait_for_each_other", "key_never_set"}


def places(name: str) -> dict[str, str]:
    """The lines of `hang_programs.py` that are marked with this name."""
    marks = (
        (line.rpartition(f"# {name}: ")[2], number)
        for number, line in enumerate(PROGRAM.read_text().splitlines(), 1)
        if f"# {name}: " in line
    )
    return {who: f"{PROGRAM.name}:{number}" for who, number in marks}
