"""The blocking names are the asynchronous ones, and say how their calls end."""

from __future__ import annotations

import inspect

import pytest

import asyncdist
from asyncdist import blocking

ONLY_ASYNCHRONOUS = {
    "run",  # there is no event loop to run
    "__version__",
    # what goes on between two calls: a blocking store has keys, counters and queues
    *("Lease", "Lock", "MemberEvent", "Membership", "Watch", "WatchEvent", "Worlds"),
}
FUNCTIONS = [name for name in blocking.__all__ if inspect.isfunction(getattr(blocking, name))]


def test_every_name_is_here() -> None:
    assert set(blocking.__all__) == set(asyncdist.__all__) - ONLY_ASYNCHRONOUS


def test_all_is_sorted_as_there() -> None:
    assert list(blocking.__all__) == [name for name in asyncdist.__all__ if name in set(blocking.__all__)]


@pytest.mark.parametrize("name", blocking.__all__)
def test_every_name_exists_and_is_documented(name: str) -> None:
    thing = getattr(blocking, name)
    if inspect.isclass(thing) or inspect.isroutine(thing):
        assert inspect.getdoc(thing)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_awaitable_is_left(name: str) -> None:
    function = getattr(blocking, name)
    assert not inspect.iscoroutinefunction(function)
    if "async_op" in inspect.signature(function).parameters:
        parameters = list(inspect.signature(inspect.unwrap(function)).parameters)
        assert [p for p in inspect.signature(function).parameters if p != "async_op"] == parameters


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_gives_a_work_there_waits_here_or_gives_one_too(name: str) -> None:
    """A function lifted as a mere question would hand out what only an event loop can wait for."""
    function = getattr(blocking, name)
    returns = str(inspect.signature(inspect.unwrap(function)).return_annotation)
    if returns.startswith(("Work", "list[Work", "Awaitable", "Async")):
        assert "refuse_loop" in function.__code__.co_names or "_run" in function.__code__.co_names


def test_the_world_is_spelled_as_in_torch() -> None:
    assert blocking.group.WORLD is asyncdist.group.WORLD is None


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("all_reduce_multigpu", ["tensor_list", "op", "group", "async_op"]),
        ("broadcast_multigpu", ["tensor_list", "src", "group", "async_op"]),
        ("reduce_multigpu", ["tensor_list", "dst", "op", "group", "async_op"]),
        ("all_gather_multigpu", ["output_tensor_lists", "input_tensor_list", "group", "async_op"]),
        ("reduce_scatter_multigpu", ["output_tensor_list", "input_tensor_lists", "op", "group", "async_op"]),
    ],
)
def test_lists_of_torch_1_have_their_arguments_in_its_places(name: str, places: list[str]) -> None:
    """What torch has after them is given by name here, as everywhere: `src_tensor` and `dst_tensor`."""
    parameters = inspect.signature(getattr(blocking, name)).parameters.values()
    assert [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD] == places


@pytest.mark.parametrize("name", ["all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"])
def test_what_has_no_async_op_in_torch_takes_it_by_name_only(name: str) -> None:
    """torch's last place is another thing's, `group_dst` for example: as `async_op` it would choose the wrong root."""
    function = getattr(blocking, name)
    parameters = inspect.signature(function).parameters
    assert parameters["async_op"].kind is inspect.Parameter.KEYWORD_ONLY
    places = [one for one in parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
    with pytest.raises(TypeError, match="positional arguments but"):
        function([None], *[None] * (len(places) - 1), 1)
