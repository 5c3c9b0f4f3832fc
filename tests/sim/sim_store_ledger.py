"""What all simulated clients were told, and what must be true of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from linearizability import History, check_history
from store_models import RegisterModel

from asyncdist.store.watch import WatchEvent

__all__ = ["Ledger", "Round", "Watched"]

MAX_STEPS = 60_000
"""States the search for an order may visit for one key; a key that needs more is counted as undecided."""


@dataclass
class Watched:
    """What one watcher saw without a break: everything of its prefix from one revision to another."""

    who: str
    incarnation: str
    events: list[WatchEvent] = field(default_factory=list)
    first: int | None = None
    last: int | None = None
    began_at: float = 0.0
    caught_up_at: float = -1.0


@dataclass
class Round:
    """What one member was told of a round."""

    who: str
    epoch: int
    rank: int
    members: tuple[str, ...]
    least: int
    most: int


class Ledger:
    """Kept by the simulation, which belongs to no process and so never forgets."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.problems: list[str] = []
        self.on_problem: Callable[[str], None] = lambda text: None
        self.verbs: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.history = History(clock)
        self.adds: defaultdict[tuple[str, str], list[int | None]] = defaultdict(list)
        self.appends: defaultdict[tuple[str, str], dict[str, bool]] = defaultdict(dict)
        self.pushed: defaultdict[str, dict[str, bool]] = defaultdict(dict)
        self.popped: defaultdict[str, list[tuple[str, float, str]]] = defaultdict(list)  # item, when, by whom
        self.lost_pops: Counter[str] = Counter()
        self.may_have_told: Callable[[str, float], bool] = lambda who, popped_at: True
        """Whether a client had time to let the store know what it popped then; else that may go to another."""
        self.all_are_back = False
        """Whether the store has forgotten all clients and put back what was on its way to them."""
        self.watched: list[Watched] = []
        self.watched_sets: list[tuple[str, str, float, float]] = []  # incarnation, value, called, returned
        self.tokens: defaultdict[str, list[tuple[float, float, int, str]]] = defaultdict(list)
        self.rounds: defaultdict[tuple[str, str, int], list[Round]] = defaultdict(list)
        self.flags: dict[tuple[str, str], float] = {}  # since when they are known to be there
        self.undecided = 0

    def problem(self, text: str) -> None:
        """Note that a promise was broken."""
        self.problems.append(f"at {self.clock():.6f} s: {text}")
        self.on_problem(text)

    # ---- judging

    def judge(self, incarnation: str, final: dict[str, bytes], items: list[str]) -> None:
        """Compare everything with what the store held at the end."""
        self._judge_registers()
        self._judge_counters(incarnation, final)
        self._judge_logs(incarnation, final)
        self._judge_queue(incarnation, items)
        self._judge_watches()
        self._judge_tokens()
        self._judge_rounds()

    def _judge_registers(self) -> None:
        report = check_history(self.history.operations, RegisterModel(), max_steps=MAX_STEPS)
        self.undecided += report.undecided
        self.outcomes["operations judged for linearizability"] += report.operations
        for verdict in report.failures:
            if verdict.outcome == "violation":
                self.problem(verdict.explanation)

    def _judge_counters(self, incarnation: str, final: dict[str, bytes]) -> None:
        for (where, key), sums in self.adds.items():
            told = [total for total in sums if total is not None]
            if len(set(told)) != len(told):
                self.problem(f"two adds of 1 to {key} were told the same sum: {sorted(told)}")
            if any(not 0 < total <= len(sums) for total in told):
                self.problem(f"{len(sums)} adds of 1 to {key} were told {sorted(told)}")
            if where == incarnation:
                value = int(final.get(key, b"0"))
                if not max(len(told), *told, 0) <= value <= len(sums):
                    self.problem(f"{key} is {value} after {len(told)} acknowledged adds of 1, {len(sums)} in all")

    def _judge_logs(self, incarnation: str, final: dict[str, bytes]) -> None:
        for (where, key), entries in self.appends.items():
            if where != incarnation:
                continue
            found = Counter(final.get(key, b"").decode().split(",")[:-1])
            for entry, count in found.items():
                if entry not in entries:
                    self.problem(f"{key} holds {entry}, which nobody appended to this incarnation of the store")
                elif count > 1:
                    self.problem(f"{entry} was appended {count} times to {key}")
            lost = [entry for entry, known in entries.items() if known and entry not in found]
            if lost:
                self.problem(f"acknowledged appends to {key} are lost: {lost}")

    def _judge_queue(self, incarnation: str, items: list[str]) -> None:
        for where, pushed in self.pushed.items():
            seen = Counter(item for item, when, who in self.popped[where] if self.may_have_told(who, when))
            took_along = {item for item, when, who in self.popped[where] if not self.may_have_told(who, when)}
            if where == incarnation:
                seen.update(items)
            for item, count in (seen | Counter(took_along)).items():
                if item not in pushed:
                    self.problem(f"the item {item} was popped and never pushed to this incarnation of the store")
                elif count > 1:
                    self.problem(f"the item {item} was popped {count} times")
            if where == incarnation:
                lost = [item for item, known in pushed.items() if known and item not in seen and item not in took_along]
                self.outcomes["items that came back"] += len(took_along & seen.keys())
                allowed = 0 if self.all_are_back else self.lost_pops[where]
                if len(lost) > allowed:
                    self.problem(f"acknowledged items are lost: {lost}; {self.lost_pops[where]} pops were cut off")

    def _judge_watches(self) -> None:
        happened: dict[str, dict[int, WatchEvent]] = defaultdict(dict)
        for seen in self.watched:
            for event in seen.events:
                if happened[seen.incarnation].setdefault(event.revision, event) != event:
                    self.problem(f"watchers were told different things of revision {event.revision}: {event}")
        for seen in self.watched:
            revisions = [event.revision for event in seen.events]
            if revisions != sorted(set(revisions)):
                self.problem(f"{seen.who} was told revisions out of order: {revisions}")
            if seen.last is None:
                continue
            begin = seen.first if seen.first is not None else seen.last
            missed = {each for each in happened[seen.incarnation] if begin <= each <= seen.last} - set(revisions)
            if missed:
                self.problem(f"{seen.who} watched from {begin} to {seen.last} and missed the revisions {missed}")
            values = {event.value.decode() for event in seen.events if event.kind == "set"}
            for where, value, called, returned in self.watched_sets:
                inside = seen.began_at < called and returned < seen.caught_up_at
                if where == seen.incarnation and inside and value not in values:
                    self.problem(f"{seen.who} watched and missed the value {value} set at {called:.6f} s")

    def _judge_tokens(self) -> None:
        for name, grants in self.tokens.items():
            tokens = [token for _, _, token, _ in grants]
            if len(set(tokens)) != len(tokens):
                self.problem(f"the lock {name} was given twice with one token: {sorted(tokens)}")
            for _, returned, token, who in grants:
                for called, _, later, other in grants:
                    if returned < called and later <= token:
                        self.problem(f"{other} got the lock {name} with token {later}, after {who} had {token}")

    def _judge_rounds(self) -> None:
        for (_, job, _), told in self.rounds.items():
            if len({(each.epoch, each.members) for each in told}) > 1:
                self.problem(f"members of {job} were told different things of one round: {told}")
            for each in told:
                if each.members[each.rank] != each.who or len(set(each.members)) != len(each.members):
                    self.problem(f"{each.who} is not at its rank in {each}")
                if not each.least <= len(each.members) <= each.most:
                    self.problem(f"a round has the wrong number of members: {each}")
            if len({each.rank for each in told}) != len(told):
                self.problem(f"two members of {job} have one rank: {told}")
