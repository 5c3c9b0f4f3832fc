"""Every algorithm of every collective against numpy, over dtypes, reductions, worlds, hosts, roots and counts."""

from __future__ import annotations

import asyncio

import pytest
from differential import DTYPES, RUNS, Case, Group, Tagged, choose, ops_of
from fewer_cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncdist as dist
from asyncdist.plan.algorithms.registry import ALGORITHMS
from asyncdist.testing import run_world


@st.composite
def cases(draw: st.DrawFn, sizes: st.SearchStrategy[int] | None = None) -> Case:
    size = draw(st.integers(1, 9) if sizes is None else sizes)
    dtype = draw(st.sampled_from(DTYPES))
    lengths = st.one_of(st.integers(0, 9), st.sampled_from([64, 1000, 20_011]))
    counts = draw(st.one_of(lengths.map(lambda one: (one,) * size), st.tuples(*[lengths] * size)))
    return Case(size, dtype, draw(st.sampled_from(ops_of(dtype))), counts, draw(st.integers(0, size - 1)), draw(salts))


salts = st.integers(0, 99)
seeds = st.one_of(st.none(), st.integers(0, 2**32))


@pytest.mark.parametrize(
    ("collective", "algorithm"), [(name, one) for name, all_ in ALGORITHMS.items() for one in all_]
)
@settings(max_examples=examples(4))
@given(cases(), st.data(), seeds)
def test_every_algorithm(collective: str, algorithm: str, case: Case, data: st.DataObject, seed: int | None) -> None:
    divisors = [count for count in range(1, case.size + 1) if case.size % count == 0]
    ranks_per_host = data.draw(st.sampled_from(divisors))

    async def main(group: Group) -> None:
        choose(group, collective, algorithm, ranks_per_host)
        await RUNS[collective](group, case)

    run_world(case.size, main, seed=seed)


def test_every_collective_is_run() -> None:
    assert RUNS.keys() == ALGORITHMS.keys()


@settings(max_examples=examples(10))
@given(st.integers(2, 6), st.data(), seeds)
def test_many_at_once_on_tags_and_groups(size: int, data: st.DataObject, seed: int | None) -> None:
    """Each rank has a task per tag and group, which go on at their own pace; what they run is drawn for each."""
    programs = data.draw(
        st.lists(
            st.tuples(
                st.lists(st.integers(0, size - 1), min_size=1, unique=True),
                st.lists(st.sampled_from(sorted(RUNS)), min_size=1, max_size=4),
            ),
            min_size=1,
            max_size=6,
        )
    )
    drawn = [[data.draw(cases(st.just(len(ranks)))) for _ in names] for ranks, names in programs]

    async def main(group: Group) -> None:
        async def program(one: Group, tag: int) -> None:
            _, names = programs[tag]
            for name, case in zip(names, drawn[tag], strict=True):
                await RUNS[name](Tagged(one, tag), case)

        whole = [ranks for ranks, _ in programs]
        made = [dist.new_group(ranks, sort_ranks=False) for ranks in whole]
        shared = {tuple(ranks): one for ranks, one in zip(whole, made, strict=True)}  # equal ranks share a group
        async with asyncio.TaskGroup() as tasks:
            for tag, ranks in enumerate(whole):
                one = shared[tuple(ranks)]
                if isinstance(one, Group):
                    tasks.create_task(program(one, tag))
        await group.barrier()

    run_world(size, main, seed=seed)
