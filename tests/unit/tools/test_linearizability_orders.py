"""Small histories of every kind: the judge says what trying all orders says."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from fewer_cases import examples
from history_kit import op
from hypothesis import given, settings
from hypothesis import strategies as st
from linearizability import IMPOSSIBLE, UNKNOWN, Model, Operation, check_history
from store_models import QueueModel, RegisterModel

REGISTER_CALLS = (
    ("set", (b"1",), None),
    ("set", (b"2",), None),
    ("get", (), b"1"),
    ("get", (), b"2"),
    ("get", (), None),
    ("add", (1,), 2),
    ("add", (1,), UNKNOWN),
    ("set", (b"2",), UNKNOWN),
    ("append", (b"7",), UNKNOWN),
    ("get", (), b"77"),
    ("delete", (), True),
    ("delete", (), False),
    ("compare_set", (b"1", b"2"), b"1"),
    ("compare_set", (b"1", b"2"), b"2"),
)
QUEUE_CALLS = (
    ("push", (), None),
    ("push", (), None),
    ("push", (), UNKNOWN),
    ("pop", (), 0),
    ("pop", (), 1),
    ("pop", (), 2),
    ("pop", (), None),
    ("pop", (), UNKNOWN),
    ("return", (), UNKNOWN),
    ("len", (), 1),
)


def small(calls: Sequence[Any]) -> st.SearchStrategy[list[Any]]:
    """A few operations: when called, how long it took, which call and result, in which session."""
    times = st.integers(0, 12), st.integers(1, 8)
    return st.lists(
        st.tuples(*times, st.sampled_from(calls), st.sampled_from([None, None, "s"])), min_size=1, max_size=5
    )


def by_trying_all(operations: list[Operation], model: Model) -> bool:
    """Whether any order of the known operations and any choice of the unknown ones fits."""
    known = [operation for operation in operations if operation.result is not UNKNOWN]
    unknown = [operation for operation in operations if operation.result is UNKNOWN]
    for count in range(len(unknown) + 1):
        for chosen_ones in itertools.combinations(unknown, count):
            for order in itertools.permutations([*known, *chosen_ones]):
                if fits(order, model):
                    return True
    return False


def fits(order: tuple[Operation, ...], model: Model) -> bool:
    for first, second in itertools.combinations(order, 2):
        in_session = first.session is not None and first.session == second.session
        known = UNKNOWN not in (first.result, second.result)
        if second.returned_at < first.called_at or (in_session and known and second.called_at < first.called_at):
            return False
    state: Any = model.initial
    for operation in order:
        state = model.apply(state, operation)
        if state is IMPOSSIBLE:
            return False
    return True


def drawn_history(drawn: list[Any]) -> list[Operation]:
    """The operations drawn; what is pushed is its number, so that no item is pushed twice."""
    return [
        op(
            called_at + number / 100,
            called_at + length,
            name,
            *((number,) if name == "push" else arguments),
            to=result,
            client="gone" if result is UNKNOWN else number,
            until=length < 5,
            session=session,
        )
        for number, (called_at, length, (name, arguments, result), session) in enumerate(drawn)
    ]


def test_a_late_read_does_not_keep_what_ended_unknown_before_it_from_being_seen() -> None:
    operations = [
        op(0, 1, "add", 1, to=UNKNOWN, client="gone", until=True),
        op(0.5, 3, "delete", to=True),
        op(2, 3, "get", to=None),
    ]
    assert check_history(operations, RegisterModel()).linearizable


@settings(max_examples=examples(100))
@given(small(REGISTER_CALLS))
def test_the_verdict_is_that_of_trying_all_orders(drawn: list[Any]) -> None:
    operations = drawn_history(drawn)
    assert check_history(operations, RegisterModel()).linearizable == by_trying_all(operations, RegisterModel())


@settings(max_examples=examples(100))
@given(small([call for call in REGISTER_CALLS if call[0] in ("set", "get")]))
def test_what_is_inferred_of_what_is_only_set_changes_no_verdict(drawn: list[Any]) -> None:
    operations = drawn_history(drawn)
    assert check_history(operations, RegisterModel()).linearizable == by_trying_all(operations, RegisterModel())


@settings(max_examples=examples(100))
@given(small(QUEUE_CALLS))
def test_what_is_inferred_of_a_queue_changes_no_verdict(drawn: list[Any]) -> None:
    operations = drawn_history(drawn)
    assert check_history(operations, QueueModel()).linearizable == by_trying_all(operations, QueueModel())
