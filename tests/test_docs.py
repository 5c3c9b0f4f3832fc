"""The documents name what exists, and all of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import asyncdist
from asyncdist import blocking, errors
from asyncdist.concurrency.trace import PREFIX, VARIABLES
from asyncdist.plan.algorithms.registry import ALGORITHMS, SHARED_ALGORITHMS

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
BENCHMARKS = sorted((ROOT / "docs" / "benchmarks").glob("*.md"))
SOURCES = [path for folder in ("asyncdist", "server") for path in (ROOT / folder).rglob("*.py")]
FACT = r"^(?:- |\| )(date|commit|processor)(?:: | \| )(.+?)(?: \|)?$"
"""A line of a list, or of a table."""
VARIABLE = re.compile(r"ASYNCDIST_[A-Z]+(?:_[A-Z]+)*\b(?!_)")


def variables_in(*paths: Path) -> set[str]:
    """The daemon's options apart, which `test_operations_doc` looks after."""
    found = {name for path in paths for name in VARIABLE.findall(path.read_text())}
    return {name for name in found if not name.startswith("ASYNCDIST_SERVER")}


def test_every_environment_variable_is_documented_and_read() -> None:
    assert variables_in(ROOT / "docs" / "environment.md") == variables_in(*SOURCES)
    assert variables_in(*SOURCES) == {PREFIX + name for name in VARIABLES}
    assert variables_in(*DOCUMENTS) <= variables_in(*SOURCES)


def test_every_file_in_the_map_is_there() -> None:
    homes = [
        ROOT,
        ROOT / "asyncdist",
        ROOT / "server" / "asyncdist_server",
        ROOT / "asyncdist" / "transport" / "protocol",
    ]
    homes.append(ROOT / "asyncdist" / "transport" / "connections")
    homes += [ROOT / "asyncdist" / "launch", ROOT / "asyncdist" / "launch" / "rendezvous"]
    named = re.findall(r"`([a-z_0-9/]+(?:\.py|/))`", (ROOT / "docs" / "architecture.md").read_text())
    assert len(named) > 50
    assert not [name for name in named if not any((home / name).exists() for home in homes)]


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    assert (
        not {page.name for page in (ROOT / "docs").glob("*.md")}
        - {"index.md"}
        - set(re.findall(r"\((\w[\w-]*\.md)\)", index))
    )


def test_every_error_is_documented() -> None:
    documented = set(re.findall(r"`(\w+Error)`", (ROOT / "docs" / "errors.md").read_text()))
    python = {"TypeError", "ValueError", "RuntimeError", "TimeoutError"}
    assert documented - python == set(errors.__all__)


def test_every_public_name_is_documented() -> None:
    words = set(re.findall(r"\w+", "".join(path.read_text() for path in DOCUMENTS if path.name != "CHANGELOG.md")))
    assert set(asyncdist.__all__) - {"__version__"} - words == set()
    assert set(blocking.__all__) - words == set()


def test_every_name_of_the_package_in_the_documents_exists() -> None:
    text = "".join(path.read_text() for path in DOCUMENTS)
    names = set(re.findall(r"\bdist\.(\w+)\(", text)) | set(re.findall(r"\basyncdist\.(\w+)\(", text))
    assert {name for name in names if not hasattr(asyncdist, name)} == set()


def test_every_algorithm_is_documented_for_its_collectives() -> None:
    rows = (ROOT / "docs" / "algorithms.md").read_text().split("|---|---|---|---|")[1].split("\n\n")[0]
    documented: set[tuple[str, str]] = set()
    algorithm = ""
    for row in rows.strip().splitlines():
        name, collectives = (cell.strip(" `") for cell in row.split("|")[1:3])
        algorithm = name or algorithm  # an empty cell repeats the one above
        documented |= {(collective, algorithm) for collective in re.findall(r"[a-z]+_?[a-z_]+", collectives)}
    every = {(name.removesuffix("_uneven"), algorithm) for name, table in ALGORITHMS.items() for algorithm in table}
    every |= {
        (name.removesuffix("_uneven"), algorithm) for name, table in SHARED_ALGORITHMS.items() for algorithm in table
    }
    assert {pair for pair in documented if pair[0] in ALGORITHMS} == every


@pytest.mark.parametrize("document", [*DOCUMENTS, *BENCHMARKS], ids=lambda path: path.name)
def test_every_link_leads_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", document.read_text())
    assert not [link for link in links if "://" not in link and not (document.parent / link).exists()]


def anchors_of(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", [*DOCUMENTS, *BENCHMARKS], ids=lambda path: path.name)
def test_every_anchor_of_a_link_is_a_heading(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text())
    assert not [
        (target, anchor)
        for target, anchor in links
        if anchor not in anchors_of(document.parent / target if target else document)
    ]


@pytest.mark.parametrize("page", [page for page in BENCHMARKS if page.stem != "gaps"], ids=lambda page: page.stem)
def test_figures_say_when_of_which_sources_and_on_which_processor_they_were_taken(page: Path) -> None:
    """`gaps` speaks of the figures of the other pages."""
    facts = dict(re.findall(FACT, page.read_text(), re.M))
    assert facts.keys() == {"date", "commit", "processor"}
    assert re.match(r"\d{4}-\d\d-\d\d\b", facts["date"])
    assert re.match(r"[0-9a-f]{7,}\b|unknown", facts["commit"])
