"""What many simulated runs came to, and whether they tested anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from sim_store import Outcome, run_store_scenario
from sim_store_scenario import CLIENT_FAULTS, DAEMON_FAULTS, DISK_FAULTS, store_scenario

__all__ = ["Totals", "replay_command", "run_seeds"]

VERBS = (
    "add",
    "append",
    "check",
    "compare_set",
    "delete_key",
    "get",
    "hold",
    "join",
    "leave",
    "lease",
    "list_keys",
    "lock",
    "multi_get",
    "multi_set",
    "num_keys",
    "queue_len",
    "queue_pop",
    "queue_push",
    "release",
    "revoke",
    "set",
    "set_leased",
    "status",
    "wait",
    "waits",
    "watch",
)
OUTCOMES = (
    "ok",
    "timeout",
    "cancelled",
    "failed",
    "empty",
    "limit",
    "compacted",
    "resumed",
    "new incarnations",
    "leases lost",
    "locks lost",
    "members' news",
    "watches caught up",
    "operations judged for linearizability",
)
"""What must have happened somewhere in a number of runs."""


@dataclass
class Totals:
    """Sums over runs, and the failures."""

    seeds: int = 0
    virtual_s: float = 0.0
    undecided: int = 0
    verbs: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    network: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count one run."""
        self.virtual_s += outcome.virtual_s
        self.undecided += outcome.undecided
        self.verbs += outcome.verbs
        self.outcomes += outcome.outcomes
        self.faults += outcome.faults
        self.network += outcome.network

    def merge(self, other: Totals) -> None:
        """Count other runs."""
        self.seeds += other.seeds
        self.failures += other.failures
        self.virtual_s += other.virtual_s
        self.undecided += other.undecided
        for name in ("verbs", "outcomes", "faults", "network"):
            getattr(self, name).update(getattr(other, name))

    def untested(self, mode: str = "memory") -> list[str]:
        """Return what should have happened and never did."""
        faults = CLIENT_FAULTS + DAEMON_FAULTS + (DISK_FAULTS if mode == "durable" else ())
        wanted = (
            ("verb", VERBS, self.verbs),
            ("outcome", OUTCOMES, self.outcomes),
            ("fault", faults, self.faults),
        )
        return [
            f"{kind} {name}"
            for kind, names, counts in wanted
            for name in names
            if not counts[name] and not (mode == "durable" and name == "new incarnations")
        ]

    def report(self) -> str:
        """Return all counts, for people."""
        lines = [
            f"{self.seeds} seeds, {self.virtual_s / 3600:.1f} virtual hours, {sum(self.verbs.values()):,} operations, "
            f"{self.outcomes['operations judged for linearizability']:,} of them judged for linearizability "
            f"({self.undecided} keys undecided), {sum(self.faults.values()):,} faults, {len(self.failures)} failures"
        ]
        for name in ("faults", "verbs", "outcomes", "network"):
            counts = sorted(getattr(self, name).items(), key=lambda item: -item[1])
            lines.append(f"{name}: " + ", ".join(f"{what} {count:,}" for what, count in counts))
        return "\n".join(lines)


def replay_command(seed: int, mode: str) -> str:
    """Return what to type to see a seed fail again, with everything that happened."""
    return f"python tests/sim/simulate_store.py --first {seed} --seeds 1 --mode {mode} --trace"


def run_seeds(seeds: Iterable[int], mode: str = "memory", most_failures: int = 10) -> Totals:
    """Run each seed; stop after some failures."""
    totals = Totals()
    for seed in seeds:
        totals.seeds += 1
        try:
            totals.add(run_store_scenario(store_scenario(seed, mode)))
        except AssertionError as error:
            totals.failures.append(f"{error}\n  replay: {replay_command(seed, mode)}")
            if len(totals.failures) == most_failures:
                break
    return totals
