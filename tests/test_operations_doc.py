"""docs/operations.md has every option, every metric and every event of the daemon, and nothing else."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.core import ParameterSource

from asyncdist.launch.metrics import METRICS as NODE_METRICS
from asyncdist.launch.metrics import PREFIX as NODE_PREFIX
from asyncdist_server.cli import main
from asyncdist_server.ops.metrics import METRICS, PREFIX

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "operations.md").read_text()
FAMILIES = ((PREFIX, METRICS), (NODE_PREFIX, NODE_METRICS))
SOURCES = sorted((ROOT / "server" / "asyncdist_server").rglob("*.py"))


def rows(header: str) -> list[list[str]]:
    """The cells of the table with this header."""
    table = TEXT.split(header + "\n", 1)[1].split("\n\n")[0]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[1:]]


def options() -> dict[str, click.Option]:
    found = [parameter for parameter in main.params if isinstance(parameter, click.Option)]
    return {option.opts[0]: option for option in found if option.name != "version"}


def variable(flag: str) -> str:
    return "ASYNCDIST_SERVER_" + flag.removeprefix("--").replace("-", "_").upper()


def test_every_option_is_documented_with_its_variable_and_default() -> None:
    documented = {row[0].strip("`"): row for row in rows("| option | variable | default | |")}
    assert documented.keys() == options().keys()
    for flag, option in options().items():
        _, name, default, about = documented[flag]
        assert name == f"`{variable(flag)}`"
        assert about
        expected = "" if option.is_flag or option.multiple or option.default is None else f"{option.default!s}"
        assert default.strip("`") == expected.removesuffix(".0"), flag


def given(option: click.Option, folder: Path) -> str:
    """A value for a variable, of the right type."""
    if isinstance(option.type, click.Path):
        (folder / "file").touch()
        return str(folder if option.type.dir_okay else folder / "file")
    if isinstance(option.type, click.Choice):
        return str(option.type.choices[-1])
    return {"text": "relaxed:5", "boolean": "1", "float": "7.5"}.get(option.type.name, "77")


def test_every_option_reads_its_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        for flag, option in options().items():
            patch.setenv(variable(flag), given(option, tmp_path))
        context = main.make_context("asyncdist-server", [])
    for flag, option in options().items():
        assert option.name is not None
        assert context.get_parameter_source(option.name) is ParameterSource.ENVIRONMENT, flag
        assert str(context.params[option.name]) in (given(option, tmp_path), "True", "(77,)")


def test_a_flag_wins_over_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCDIST_SERVER_PORT", "77")
    monkeypatch.setenv("ASYNCDIST_SERVER_DATA_DIR", "")
    context = main.make_context("asyncdist-server", ["--port", "78"])
    assert context.params["port"] == 78
    assert context.params["data_dir"] is None


def test_variables_in_the_documents_are_those_of_options() -> None:
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "server").glob("*.service")]
    found = {name for path in documents for name in re.findall(r"ASYNCDIST_SERVER_[A-Z_]+\b(?<!_)", path.read_text())}
    assert found == set(map(variable, options()))


def test_every_metric_is_documented_with_its_kind_and_labels() -> None:
    documented = [tuple(row[:3]) for row in rows("| metric | kind | labels | |")]
    assert documented == [
        (f"`{PREFIX}{metric.name}{'_total' * (metric.kind == 'counter')}`", metric.kind, ", ".join(metric.labels))
        for metric in METRICS
    ]


def test_alerts_ask_for_metrics_that_exist() -> None:
    names = {PREFIX + metric.name + "_total" * (metric.kind == "counter") for metric in METRICS}
    names |= {f"{PREFIX}{metric.name}_bucket" for metric in METRICS if metric.kind == "histogram"}
    rules = TEXT.split("```yaml")[1].split("```")[0]
    asked = set(re.findall(rf"{PREFIX}\w+", rules))
    assert asked
    assert asked <= names


def test_every_metric_of_a_node_is_documented_with_its_kind_and_labels() -> None:
    documented = [tuple(row[:3]) for row in rows("| metric of a node | kind | labels | |")]
    assert documented == [
        (f"`{NODE_PREFIX}{metric.name}{'_total' * (metric.kind == 'counter')}`", metric.kind, ", ".join(metric.labels))
        for metric in NODE_METRICS
    ]


def test_the_board_asks_for_metrics_and_labels_that_exist() -> None:
    known = {prefix + metric.name: metric for prefix, all_ in FAMILIES for metric in all_}
    panels = json.loads((ROOT / "docs" / "grafana.json").read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    found = set()
    for expression in asked:
        for name, suffix in re.findall(rf"({NODE_PREFIX}\w+?)(_total|_bucket|_count|)\b", expression):
            metric = known[name]
            assert {"_total": "counter", "": "gauge"}.get(suffix, "histogram") == metric.kind, expression
            labels = {label.strip() for text in re.findall(r"by \((.*?)\)", expression) for label in text.split(",")}
            assert labels <= {*metric.labels, "le"}, expression
            found.add(metric)
    assert found >= set(NODE_METRICS)


def logged() -> Iterator[str]:
    """The names of the events that the daemon logs: what `EventLog`'s methods and `Connection._tell` are given."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
                continue
            of_log = node.func.attr in ("info", "warning", "error") and "events" in ast.unparse(node.func.value)
            if of_log or node.func.attr == "_tell":
                names = [part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant)]
                yield from (name for name in names if isinstance(name, str))


def test_every_event_is_documented() -> None:
    documented = {name for row in rows("| event | |") for name in re.findall(r"`(\w+)`", row[0])}
    assert documented == {*logged(), "lines_suppressed"}
