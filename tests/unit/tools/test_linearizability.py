"""The checker: histories known to be linearizable and known not to be, generated ones, and all orders of small ones."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from history_kit import op
from linearizability import (
    IMPOSSIBLE,
    QUICK_STEPS,
    REFUSED,
    UNKNOWN,
    History,
    Model,
    Operation,
    check_history,
)
from store_models import LockModel, LogModel, QueueModel, RegisterModel


def verdict(model: Model, operations: Sequence[Operation]) -> str:
    [found] = check_history(operations, model).verdicts
    return found.outcome


REGISTER_YES = {
    "in sequence": [op(0, 1, "set", b"1"), op(2, 3, "get", to=b"1"), op(4, 5, "delete", to=True), op(6, 7, "get")],
    "a read during a write sees either": [op(0, 1, "set", b"1"), op(2, 9, "set", b"2"), op(3, 4, "get", to=b"1")],
    "or the other": [op(0, 1, "set", b"1"), op(2, 9, "set", b"2"), op(3, 4, "get", to=b"2")],
    "an unknown write seen late": [op(0, 1, "set", b"2", to=UNKNOWN), op(5, 6, "get"), op(8, 9, "get", to=b"2")],
    "an unknown write never seen": [op(0, 1, "set", b"2", to=UNKNOWN), op(5, 6, "get")],
    "an unknown write in its time": [op(0, 4, "set", b"2", to=UNKNOWN, until=True), op(3, 5, "get", to=b"2")],
    "an unknown write after the time of one like it": [
        op(0, 2, "append", b"7", to=UNKNOWN, until=True),
        op(1, 2, "append", b"7", to=UNKNOWN),
        op(3, 4, "get"),
        op(5, 6, "get", to=b"7"),
    ],
    "counted": [op(0, 5, "add", 1, to=2), op(0.5, 4, "add", 1, to=1), op(6, 7, "get", to=b"2")],
    "refused": [op(0, 1, "set", b"x"), op(2, 3, "add", 1, to=REFUSED), op(4, 5, "get", to=b"x")],
    "an empty value is no number": [op(0, 1, "set", b""), op(2, 3, "add", 1, to=REFUSED)],
    "beyond int64": [op(0, 1, "add", 2**63 - 1, to=2**63 - 1), op(2, 3, "add", 1, to=REFUSED)],
    "at the end of int64": [op(0, 1, "add", 2**63 - 2, to=2**63 - 2), op(2, 3, "add", 1, to=2**63 - 1)],
    "appended": [
        op(0, 1, "append", b"a"),
        op(2, 3, "append", b"b"),
        op(4, 5, "get", to=b"ab"),
        op(6, 7, "check", to=1),
    ],
    "swapped once": [
        op(0, 9, "compare_set", b"", b"1", to=b"1"),
        op(0.5, 8, "compare_set", b"", b"2", to=b"1"),
        op(10, 11, "compare_set", b"0", b"3", to=b"1"),
    ],
    "swapped nothing": [op(0, 1, "compare_set", b"0", b"1", to=b"0"), op(2, 3, "get")],
    "restarted without data": [op(0, 1, "set", b"1"), op(2, 3, "restart"), op(4, 5, "get")],
    "several keys as one": [op(0, 1, "set", (b"1", b"1")), op(2, 3, "get", to=(b"1", b"1"))],
}
REGISTER_NO = {
    "stale read": [op(0, 1, "set", b"1"), op(2, 3, "set", b"2"), op(4, 5, "get", to=b"1")],
    "lost write": [op(0, 1, "set", b"1"), op(2, 3, "get")],
    "value from nowhere": [op(0, 1, "set", b"1"), op(2, 3, "get", to=b"7")],
    "value from the future": [op(0, 1, "get", to=b"1"), op(2, 3, "set", b"1")],
    "lost update": [op(0, 5, "add", 1, to=1), op(1, 6, "add", 1, to=1)],
    "added twice": [op(0, 1, "add", 1, to=1), op(2, 3, "get", to=b"2")],
    "appended twice": [op(0, 1, "append", b"a"), op(2, 3, "get", to=b"aa")],
    "unknown write seen twice": [
        op(0, 1, "append", b"a", to=UNKNOWN),
        op(2, 3, "get", to=b"a"),
        op(4, 5, "get", to=b"aa"),
    ],
    "an unknown write seen after its time": [
        op(0, 4, "set", b"2", to=UNKNOWN, until=True),
        op(5, 6, "get"),
        op(7, 8, "get", to=b"2"),
    ],
    "old and new swapped": [op(0, 9, "set", b"1"), op(1, 2, "get", to=b"1"), op(3, 4, "get")],
    "both swaps won": [op(0, 9, "compare_set", b"", b"1", to=b"1"), op(0.5, 8, "compare_set", b"", b"2", to=b"2")],
    "refused for no reason": [op(0, 1, "add", 1, to=REFUSED)],
    "deleted what was not there": [op(0, 1, "delete", to=True)],
    "torn": [op(0, 1, "set", (b"1", b"1")), op(2, 5, "set", (b"2", b"2")), op(3, 4, "get", to=(b"1", b"2"))],
}
LOG_YES = {
    "appended at once, in either order": [
        op(0, 5, "append", b"1,"),
        op(1, 5, "append", b"11,"),
        op(6, 7, "get", to=b"11,1,"),
    ],
    "an unknown token seen": [
        op(0, 5, "append", b"1,", to=UNKNOWN),
        op(1, 2, "append", b"2,"),
        op(3, 4, "get", to=b"2,"),
        op(6, 7, "get", to=b"2,1,"),
    ],
    "an unknown token never seen": [op(0, 5, "append", b"1,", to=UNKNOWN), op(6, 7, "get")],
    "lost with the data": [op(0, 1, "append", b"1,"), op(2, 3, "restart"), op(4, 5, "get")],
}
LOG_NO = {
    "order swapped": [op(0, 1, "append", b"1,"), op(2, 3, "append", b"2,"), op(4, 5, "get", to=b"2,1,")],
    "order changed": [
        op(0, 5, "append", b"1,"),
        op(1, 5, "append", b"2,"),
        op(6, 7, "get", to=b"1,2,"),
        op(8, 9, "get", to=b"2,1,"),
    ],
    "token lost": [op(0, 1, "append", b"1,"), op(2, 3, "append", b"2,"), op(4, 5, "get", to=b"2,")],
    "token twice": [op(0, 1, "append", b"1,"), op(4, 5, "get", to=b"1,1,")],
    "unknown token twice": [op(0, 1, "append", b"1,", to=UNKNOWN), op(4, 5, "get", to=b"1,1,")],
}
QUEUE_YES = {
    "first in first out": [op(0, 1, "push", b"a"), op(2, 3, "push", b"b"), op(4, 5, "pop", to=b"a")],
    "pushed at once, popped in either order": [
        op(0, 5, "push", b"a"),
        op(1, 5, "push", b"b"),
        op(6, 7, "pop", to=b"b"),
    ],
    "popped as soon as pushed": [op(0, 9, "pop", to=b"a"), op(1, 8, "push", b"a"), op(10, 11, "len", to=0)],
    "empty": [op(0, 1, "pop"), op(2, 3, "push", b"a"), op(4, 5, "len", to=1)],
    "popped by somebody unknown": [op(0, 1, "push", b"a"), op(2, 3, "pop", to=UNKNOWN), op(4, 5, "pop")],
    "lost with the data": [op(0, 1, "push", b"a"), op(2, 3, "restart"), op(4, 5, "pop")],
    "given back to the head": [
        op(0, 1, "push", b"a"),
        op(2, 3, "push", b"b"),
        op(4, 5, "pop", to=UNKNOWN, client="gone"),
        op(4, 5, "return", to=UNKNOWN, client="gone"),
        op(6, 7, "len", to=1),
        op(8, 9, "len", to=2),
        op(10, 11, "pop", to=b"a"),
    ],
    "overtaken while it was away": [
        op(0, 5, "push", b"a"),
        op(1, 5, "push", b"b"),
        op(6, 7, "pop", to=UNKNOWN, client="gone"),
        op(6, 7, "return", to=UNKNOWN, client="gone"),
        op(8, 9, "pop", to=b"a"),
        op(10, 11, "pop", to=b"b"),
    ],
}
QUEUE_NO = {
    "popped twice": [op(0, 1, "push", b"a"), op(2, 3, "pop", to=b"a"), op(4, 5, "pop", to=b"a")],
    "lost": [op(0, 1, "push", b"a"), op(2, 3, "pop")],
    "given back twice": [
        op(0, 1, "push", b"a"),
        op(4, 5, "pop", to=UNKNOWN, client="gone"),
        op(4, 5, "return", to=UNKNOWN, client="gone"),
        op(6, 7, "pop", to=b"a"),
        op(8, 9, "len", to=1),
    ],
    "overtaken": [op(0, 1, "push", b"a"), op(2, 3, "push", b"b"), op(4, 5, "pop", to=b"b")],
}
LOCK_YES = {
    "one after the other": [
        op(0, 1, "acquire", to=5, client="a"),
        op(2, 4, "release", client="a"),
        op(3, 6, "acquire", to=9, client="b"),
    ],
    "taken unnoticed, and given back": [
        op(0, 1, "acquire", to=UNKNOWN, client="a"),
        op(0, 1, "release", to=UNKNOWN, client="a"),
        op(2, 3, "acquire", to=9, client="b"),
    ],
    "lost with the data": [op(0, 1, "acquire", to=5), op(2, 3, "restart"), op(4, 5, "acquire", to=6)],
}
LOCK_NO = {
    "two holders": [
        op(0, 1, "acquire", to=5, client="a"),
        op(2, 3, "acquire", to=6, client="b"),
        op(4, 5, "release", client="a"),
    ],
    "token goes back": [
        op(0, 1, "acquire", to=5, client="a"),
        op(2, 3, "release", client="a"),
        op(4, 5, "acquire", to=5, client="b"),
    ],
    "token goes back across a restart": [op(0, 1, "acquire", to=5), op(2, 3, "restart"), op(4, 5, "acquire", to=4)],
    "released what somebody else held": [op(0, 1, "acquire", to=5, client="a"), op(2, 3, "release", client="b")],
}


@pytest.mark.parametrize(
    ("model", "history"),
    [
        pytest.param(model, history, id=name)
        for model, histories in (
            (RegisterModel(), REGISTER_YES),
            (LogModel(), LOG_YES),
            (QueueModel(), QUEUE_YES),
            (LockModel(), LOCK_YES),
        )
        for name, history in histories.items()
    ],
)
def test_linearizable_histories_pass(model: Model, history: list[Operation]) -> None:
    assert verdict(model, history) == "linearizable"


@pytest.mark.parametrize(
    ("model", "history"),
    [
        pytest.param(model, history, id=name)
        for model, histories in (
            (RegisterModel(), REGISTER_NO),
            (LogModel(), LOG_NO),
            (QueueModel(), QUEUE_NO),
            (LockModel(), LOCK_NO),
        )
        for name, history in histories.items()
    ],
)
def test_histories_that_are_not_linearizable_fail(model: Model, history: list[Operation]) -> None:
    assert verdict(model, history) == "violation"


@pytest.mark.parametrize("model", [RegisterModel(), QueueModel(), LockModel()], ids=lambda model: type(model).__name__)
def test_a_model_refuses_what_it_does_not_know(model: Model) -> None:
    with pytest.raises(ValueError, match="knows nothing of fly"):
        check_history([op(0, 1, "fly")], model)


def test_a_session_keeps_the_order_of_its_calls() -> None:
    both = [op(0, 9, "add", 1, to=2), op(1, 9, "add", 1, to=1)]
    assert verdict(RegisterModel(), both) == "linearizable"
    one_session = [dataclasses.replace(each, session="s") for each in both]
    assert verdict(RegisterModel(), one_session) == "violation"
    assert verdict(RegisterModel(), [dataclasses.replace(each, session=each.client) for each in both]) == "linearizable"


def test_keys_are_judged_one_by_one() -> None:
    good, bad = op(0, 1, "set", b"1"), dataclasses.replace(op(0, 1, "get", to=b"1"), key="other")
    report = check_history([good, bad], RegisterModel())
    assert not report.linearizable
    assert (report.operations, report.undecided, [failure.key for failure in report.failures]) == (2, 0, ["other"])
    assert check_history([], RegisterModel()).linearizable


# ---- bounds and explanations


def test_a_search_that_ends_at_its_bound_is_no_success() -> None:
    history = [op(0, 1, "add", 1, to=1), op(2, 3, "add", 1, to=2)]
    assert check_history(history, RegisterModel(), max_steps=2).linearizable
    report = check_history(history, RegisterModel(), max_steps=1)
    assert not report.linearizable
    assert (report.undecided, [failure.outcome for failure in report.failures]) == (1, ["undecided"])
    assert "not decided within 1 steps" in report.explanation


def test_unknown_operations_that_are_alike_are_not_tried_in_every_choice() -> None:
    history = [op(0, 1, "append", b"7", to=UNKNOWN) for _ in range(40)]
    [found] = check_history([*history, op(2, 3, "get", to=b"x")], RegisterModel()).verdicts
    assert (found.outcome, found.steps) == ("violation", 40), "there are two to the fortieth"
    assert verdict(RegisterModel(), [*history, op(2, 3, "get", to=b"7" * 40)]) == "linearizable"
    assert verdict(RegisterModel(), [*history, op(2, 3, "get", to=b"7" * 41)]) == "violation"


def test_unknown_operations_of_no_use_do_not_hide_an_order() -> None:
    """The first tries go wrong at the end, where dozens of unknown writes could come in, in any order."""
    unknown = [op(n, n, "append", b"%d," % n, to=UNKNOWN) for n in range(30)]
    at_once = [
        op(40, 41, "compare_set", b"", b"1", to=b"1"),
        op(40, 42, "delete", to=True),
        op(40, 43, "set", b"2"),
    ]
    [found] = check_history([*unknown, *at_once, op(50, 51, "get", to=b"1")], RegisterModel()).verdicts
    assert found.outcome == "linearizable"
    assert QUICK_STEPS < found.steps < 3 * QUICK_STEPS


def test_an_explanation_shows_the_shortest_prefix_that_fails() -> None:
    before = [op(10.0 * n, 10.0 * n + 5, "add", 1, to=n + 1) for n in range(30)]
    stale = op(300, 305, "get", to=b"29", client="stale")
    after = [op(310.0 + 10 * n, 315.0 + 10 * n, "add", 1, to=n + 31) for n in range(30)]
    text = check_history([*before, stale, *after], RegisterModel()).explanation
    assert "The shortest prefix that has no order is of 31 operations" in text
    assert "The longest order found takes 30 of them" in text
    assert text.count("stale        get() -> b'29'") == 2, "as the end of the prefix, and as what cannot come next"
    assert "In the state b'30' none" in text
    assert "add(1) -> 31" not in text, "what came later does not matter"
    assert text.count("\n") < 25


def test_an_explanation_of_the_first_operation() -> None:
    text = check_history([op(0, 1, "get", to=b"x" * 500)], RegisterModel()).explanation
    assert "takes 0 of them" in text
    assert len(text) < 600


# ---- generated histories


class Atomic:
    """An object that does one thing at a time, as the model says, asked by clients that know nothing of each other."""

    def __init__(self, model: Model, rng: random.Random) -> None:
        self.model = model
        self.state = model.initial
        self.rng = rng

    def perform(self, operation: Operation) -> Any:
        """Return the result that fits the state."""
        name = operation.name
        if name == "acquire":
            results = [self.state[1] + self.rng.randint(1, 3)]
        else:
            state, first = self.state, operation.arguments[0] if operation.arguments else None
            items = state[0] if isinstance(state, tuple) else ()
            results = [None, True, False, REFUSED, state, len(items), *items[:1], *operation.arguments]
            if isinstance(first, int):
                results.append(int(state or b"0") + first)
        for result in results:
            after = self.model.apply(self.state, dataclasses.replace(operation, result=result))
            if after is not IMPOSSIBLE:
                self.state = after
                return result
        raise AssertionError(f"nothing fits {operation}")


def recorded(model: Model, seed: int, count: int, clients: int, unknown: float) -> list[Operation]:
    """The history of clients that call, are served and return in a random order; some are never told."""
    rng = random.Random(seed)
    ticks = itertools.count()
    thing, history = Atomic(model, rng), History(lambda: float(next(ticks)))
    pending: dict[int, tuple[Operation, list[Any]]] = {}
    holding: set[int] = set()
    while len(history.operations) < count:
        client = rng.randrange(clients)
        if client not in pending:
            name, *arguments = chosen(model, rng, len(history.operations), client in holding)
            pending[client] = history.call(f"c{client}", "k", name, *arguments), []
            continue
        operation, done = pending[client]
        if not done:
            if operation.name == "acquire":
                if holding:
                    continue
                holding.add(client)
            holding -= {client} if operation.name == "release" else set()
            done.append(thing.perform(operation))
        else:
            if operation.name not in ("acquire", "release") and rng.random() < unknown:
                done = [UNKNOWN]
            operation.result = done[0]
            history.returned(operation)
            del pending[client]
    return history.operations


def chosen(model: Model, rng: random.Random, number: int, holds: bool) -> tuple[Any, ...]:
    value = b"%d" % number
    if isinstance(model, LockModel):
        return ("release" if holds else "acquire",)
    if isinstance(model, QueueModel):
        return rng.choice([("push", value), ("pop",), ("len",)])
    return rng.choice(
        [
            ("set", value),
            ("get",),
            ("get",),
            ("add", 1),
            ("append", b"7"),
            ("compare_set", b"%d" % (number - 1), value),
            ("delete",),
            ("check",),
        ]
    )


MODELS = (RegisterModel(), QueueModel(), LockModel())


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
@pytest.mark.parametrize("seed", range(8))
def test_what_an_atomic_object_does_passes(model: Model, seed: int) -> None:
    report = check_history(recorded(model, seed, 400, clients=6, unknown=0.02 * (seed % 2)), model)
    assert report.linearizable, report.explanation
    assert report.verdicts[0].steps < 40_000


def planted(history: list[Operation], rng: random.Random) -> bool:
    """Change one result to one that an earlier operation of the same kind had, long before; returns whether it could.

    That is what a stale read, a lost update and an item given out twice look like.
    """
    late = [operation for operation in history[100:] if operation.name in ("get", "add", "pop", "acquire")]
    rng.shuffle(late)
    for operation in late:
        for earlier in history:
            other = earlier.result
            if (
                earlier.name == operation.name
                and earlier.returned_at < operation.called_at - 100
                and isinstance(other, bytes | int)
                and other != operation.result
                and operation.result is not UNKNOWN
                and not any(other == each.result for each in history if each.called_at > earlier.returned_at)
            ):
                operation.result = other
                return True
    return False


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
@pytest.mark.parametrize("seed", range(6))
def test_a_planted_mistake_is_found(model: Model, seed: int) -> None:
    history = recorded(model, seed, 300, clients=4, unknown=0.0)
    assert planted(history, random.Random(seed))
    assert verdict(model, history) == "violation"


def test_an_add_applied_twice_is_found_when_nobody_was_told_the_first_sum() -> None:
    """As after a retry that the store took for a new request: later sums are one too large."""
    history = [op(n, n + 0.5, "add", 1, to=n + 1 if n < 10 else n + 2) for n in range(20)]
    assert verdict(RegisterModel(), history) == "violation"
    history.append(op(3, 4, "add", 1, to=UNKNOWN))
    assert verdict(RegisterModel(), history) == "linearizable", "one that is unknown may be the other"
