"""Pictures of plans: every algorithm is drawn, and the pages show what the command draws now."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from asyncdist.cli import main
from asyncdist.cli.picture import Arrow, arrows, draw
from asyncdist.plan.algorithms.registry import ALGORITHMS, SHARED_ALGORITHMS, build
from asyncdist.plan.problem import PRIVATE_COLLECTIVES, Problem
from asyncdist.plan.steps import Fetch, FetchReduce, Recv, RecvReduce

ROOT = Path(__file__).parents[3]
PAGE = "".join((ROOT / "docs" / page).read_text() for page in ("algorithms.md", "scaling.md"))
DRAWS = re.compile(r"^asyncdist ((?:explain .* --plot|simulate .* --latency) (docs/images/\S+))$", re.MULTILINE)
COMMANDS = DRAWS.findall(PAGE)
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan")
EVERY = [
    (collective, name)
    for table in (ALGORITHMS, SHARED_ALGORITHMS)
    for collective, named in table.items()
    if collective not in PRIVATE_COLLECTIVES
    for name in named
]


@pytest.mark.parametrize(("command", "path"), COMMANDS)
def test_the_page_shows_what_is_drawn_now(command: str, path: str, tmp_path: Path) -> None:
    words = shlex.split(command.replace(path, str(tmp_path / "drawn.svg")))
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "drawn.svg").read_text() == (ROOT / path).read_text()
    assert f"]({path.removeprefix('docs/')})" in PAGE


@pytest.mark.parametrize("world", [1, 2, 5, 8])
@pytest.mark.parametrize(("collective", "name"), EVERY)
def test_every_message_is_an_arrow(collective: str, name: str, world: int) -> None:
    problem = Problem.of_bytes(collective, world, 64 * world, 4)
    plans = [build(problem, name, rank, max(problem.total, 1)) for rank in range(world)]
    taken = [step for plan in plans for step in plan.steps if isinstance(step, Recv | RecvReduce | Fetch | FetchReduce)]
    svg = ElementTree.fromstring(draw(problem, name))
    circles = svg.findall("{http://www.w3.org/2000/svg}circle")
    assert len(circles) == len(taken)
    reduced = sum(circle.get("fill") != "white" for circle in circles)
    if collective in REDUCTIONS:
        assert reduced >= (world - 1 if collective != "exscan" else world - 2)
    else:
        assert not reduced


def test_the_latencies_of_24576_ranks_are_drawn() -> None:
    svg = ElementTree.parse(ROOT / "docs" / "images" / "all_reduce-latency.svg")
    texts = [text.text or "" for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"12", "24,576", "ring: 111 ms", "double_tree: 107 us"} <= set(texts)
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}polyline"))) == 2


def test_a_line_needs_two_worlds(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["simulate", "barrier", "--world", "2", "--latency", str(tmp_path / "x.svg")])
    assert "needs more than two hosts" in done.output


def test_a_ring_takes_its_rounds_one_after_the_other() -> None:
    problem = Problem.of_bytes("all_gather", 4, 64, 4)
    moved = arrows([build(problem, "ring", rank, problem.total) for rank in range(4)])
    assert [(arrow.round, arrow.target) for arrow in moved] == [
        (round_, (source + 1) % 4) for round_ in range(3) for source in range(4)
    ]
    assert all(isinstance(arrow, Arrow) and not arrow.reduced for arrow in moved)


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    for words, said in [
        (["--world", "33", "--algorithm", "ring"], "a picture shows up to 32 ranks, not 33"),
        (["--world", "4", "--algorithm", "square"], "square"),
    ]:
        done = CliRunner().invoke(main, ["explain", "all_reduce", *words, "--plot", str(tmp_path / "x.svg")])
        assert done.exit_code == 2
        assert said in done.output
        assert not (tmp_path / "x.svg").exists()
