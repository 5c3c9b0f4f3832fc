"""What a recorded round proves: acknowledged writes that are missing, changes made twice, what no order explains."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from linearizability import UNKNOWN, Model, Operation, check_history
from proof_load import Recorded
from store_models import LockModel, LogModel, QueueModel, RegisterModel

MAX_STEPS = 1_000_000
"""Bound of the search for one key. Histories of a store that does what it should need about one step per operation, and
many more where many were under way during an outage."""
READS = ("get", "check", "len")


@dataclass
class Findings:
    """The sums of one or more rounds; `problems` is what must be empty."""

    rounds: int = 0
    kills: int = 0
    pauses: int = 0
    cuts: int = 0
    operations: int = 0
    unknown: int = 0
    events: int = 0
    compacted: int = 0
    lost: int = 0
    twice: int = 0
    undecided: int = 0
    longest_outage_s: float = 0.0
    oldest_lost_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Count `other` in."""
        for name, value in vars(other).items():
            ours = getattr(self, name)
            setattr(self, name, max(ours, value) if name.endswith("_s") else ours + value)

    def __str__(self) -> str:
        parts = [
            f"{name} {value:.2f}" if name.endswith("_s") else f"{name} {value}"
            for name, value in vars(self).items()
            if name != "problems"
        ]
        return ", ".join(parts)


def judge(recorded: Recorded) -> Findings:
    """Judge the histories of a round whose last operations have read every key and emptied every queue."""
    findings = Findings(rounds=1, kills=len(recorded.kills), operations=recorded.operations)
    keys = recorded.registers.operations
    logs = [each for each in keys if str(each.key).startswith("l")]
    others = [each for each in keys if not str(each.key).startswith("l")]
    for name, operations, model in (
        ("keys", others, RegisterModel()),
        ("logs", logs, LogModel()),
        ("queues", recorded.queues.operations, QueueModel()),
        ("locks", recorded.locks.operations, LockModel()),
    ):
        _check(findings, name, operations, model, recorded.restarts)
    return findings


def _check(
    findings: Findings, name: str, operations: list[Operation], model: Model, restarts: Sequence[tuple[float, float]]
) -> None:
    told = [each for each in operations if each.result is not UNKNOWN or each.name not in READS]
    findings.unknown += sum(each.result is UNKNOWN for each in told)
    for each in told:
        if each.result is UNKNOWN:  # a store that lost its data gets no request again that was meant for them
            each.returned_at = next((served_at for _, served_at in restarts if served_at >= each.called_at), math.inf)
    keys = {each.key for each in told}
    told += [
        Operation("daemon", key, "restart", result=None, called_at=killed_at, returned_at=served_at)
        for key in keys
        for killed_at, served_at in restarts
    ]
    report = check_history(told, model, max_steps=MAX_STEPS)
    findings.undecided += report.undecided
    if not report.linearizable:
        findings.problems.append(f"{name}: {report.explanation}")


def count_lost_and_twice(recorded: Recorded, findings: Findings) -> None:
    """Count, without any search, acknowledged changes that are missing at the end, and changes that are there twice."""
    by_key: dict[str, list[Operation]] = {}
    for operation in recorded.registers.operations:
        by_key.setdefault(str(operation.key), []).append(operation)
    for key, operations in by_key.items():
        final = operations[-1]
        assert final.name == "get", "the last operation on every key is the one that reads what is left"
        if key.startswith("n"):
            adds = [each for each in operations if each.name == "add"]
            acknowledged = sum(each.result is not UNKNOWN for each in adds)
            _balance(findings, f"counter {key}", int(final.result or 0), acknowledged, len(adds))
        elif key.startswith("l"):
            appends = [each for each in operations if each.name == "append"]
            found = Counter((final.result or b"").split(b",")[:-1])
            tokens = {each.arguments[0][:-1]: each.result is not UNKNOWN for each in appends}
            _compare(findings, f"log {key}", found, tokens)
        elif key == "guarded":
            most = recorded.sections + recorded.unsure_sections
            _balance(findings, "critical sections", int(final.result or 0), recorded.sections, most)
    _count_queues(recorded, findings)


def _count_queues(recorded: Recorded, findings: Findings) -> None:
    queues: dict[str, list[Operation]] = {}
    for operation in recorded.queues.operations:
        queues.setdefault(str(operation.key), []).append(operation)
    for key, operations in queues.items():
        pushed = {each.arguments[0]: each.result is not UNKNOWN for each in operations if each.name == "push"}
        popped = Counter(each.result for each in operations if each.name == "pop" and isinstance(each.result, bytes))
        unknown = sum(each.name == "pop" and each.result is UNKNOWN for each in operations)
        _compare(findings, f"queue {key}", popped, pushed, may_miss=unknown)
    given_up = Counter(recorded.popped)
    unknown = given_up.pop(b"?", 0)
    _compare(findings, "queue of pops given up", given_up, recorded.pushed, may_miss=unknown)


def _balance(findings: Findings, what: str, final: int, acknowledged: int, asked: int) -> None:
    if final < acknowledged:
        findings.lost += acknowledged - final
        findings.problems.append(f"{what}: {acknowledged} were acknowledged, {final} are there")
    if final > asked:
        findings.twice += final - asked
        findings.problems.append(f"{what}: {asked} were asked for, {final} are there")


def _compare(findings: Findings, what: str, found: Counter[bytes], asked: dict[bytes, bool], may_miss: int = 0) -> None:
    """Compare what is there with what was asked for and, where true, acknowledged."""
    lost = [each for each, acknowledged in asked.items() if acknowledged and not found[each]]
    twice = [each for each, times in found.items() if times > 1]
    strange = [each for each in found if each not in asked]
    if len(lost) > may_miss:
        findings.lost += len(lost) - may_miss
        findings.problems.append(f"{what}: {len(lost)} acknowledged are missing ({may_miss} pops unknown): {lost[:9]}")
    if twice:
        findings.twice += len(twice)
        findings.problems.append(f"{what}: there twice: {twice[:9]}")
    if strange:
        findings.problems.append(f"{what}: nobody asked for {strange[:9]}")


def count_lost_of_relaxed(recorded: Recorded, findings: Findings, bound_s: float) -> None:
    """Judge the log of one writer that asked one thing at a time, of a store that may lose its last changes.

    What is lost was acknowledged within `bound_s` before a kill, and so were all that came after it: what is left is
    what the store was at one instant. Nothing is there twice.
    """
    appends = [
        each for each in recorded.registers.operations if str(each.key).startswith("s") and each.name == "append"
    ]
    final = {str(each.key): each.result or b"" for each in recorded.registers.operations if each.name == "get"}
    there = Counter(token for value in final.values() for token in value.split(b",")[:-1])
    if twice := [token for token, times in there.items() if times > 1]:
        findings.twice += len(twice)
        findings.problems.append(f"there twice: {twice[:9]}")
    lost_in: dict[int, list[Operation]] = {}
    left_in: dict[int, list[Operation]] = {}
    for append in appends:
        if append.result is UNKNOWN:
            continue
        number = bisect.bisect_left(recorded.gone, append.returned_at)
        (left_in if there[append.arguments[0][:-1]] else lost_in).setdefault(number, []).append(append)
    for number, lost in lost_in.items():
        findings.lost += len(lost)
        age_s = (recorded.kills[number] if number < len(recorded.kills) else math.inf) - lost[0].returned_at
        findings.oldest_lost_s = max(findings.oldest_lost_s, age_s)
        if age_s > bound_s:
            findings.problems.append(f"{lost[0]} was lost {age_s:.3f} s after it was acknowledged")
        later = [each for each in left_in.get(number, ()) if each.called_at > lost[0].returned_at]
        if later:
            findings.problems.append(f"{lost[0]} was lost, but {later[0]}, asked after it, was not")
