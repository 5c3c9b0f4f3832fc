"""`python -m bench.scale`: simulated times beside closed formulas, and the picture."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # bench is not installed: it lives beside the packages

from click.testing import CliRunner  # noqa: E402

from asyncdist.plan.algorithms.registry import algorithms  # noqa: E402
from asyncdist.plan.cost.constants import ASYNCIO_TCP, Constants  # noqa: E402
from bench import scale  # noqa: E402

ROUND = Constants(alpha_s=1.0, beta_s=1e-3, gamma_s=1e-4, overhead_s=0.0)


def test_every_algorithm_has_a_formula():
    assert set(scale.FORMULAS) == set(algorithms("all_reduce"))


@pytest.mark.parametrize(
    ("algorithm", "world", "seconds"),
    [
        # 1,000 bytes: 1 s to send, 0.1 s to reduce
        ("ring", 8, 14 + 7 / 8 * 2.1),
        ("ring_2d", 16, 2 * (4 + 4 - 2) + 15 / 16 * 2.1),
        ("circulant", 6, 6 + 5 / 6 * 2.1),
        ("recursive_doubling", 8, 3 * (1 + 1 + 0.1)),
        ("recursive_doubling", 6, 4 * (1 + 1) + 3 * 0.1),
        ("halving_doubling", 8, 6 + 7 / 8 * 2.1),
        ("halving_doubling", 6, 4 + 3 / 4 * 2.1 + 2 + 2.1),
        ("direct", 4, 1 + 3 * 1.1),
        ("linear", 4, 2 * (1 + 3) + 3 * 0.1),
    ],
)
def test_formulas_by_hand(algorithm, world, seconds):
    assert scale.FORMULAS[algorithm](world, 1000, ROUND) == pytest.approx(seconds)


def test_simulations_are_near_the_formulas():
    for cell in scale.scaled(96, (8, 1 << 16), ASYNCIO_TCP):
        assert scale.LOWEST <= cell.ratio <= 1.1 * scale.HIGHEST, cell


def test_the_table_marks_what_is_far_from_its_formula(monkeypatch):
    monkeypatch.setattr(scale, "SIZES", (8,))
    good = CliRunner().invoke(scale.main, ["--world", "24"], env={"COLUMNS": "150"})
    assert good.exit_code == 0, good.output
    assert f"{len(scale.FORMULAS)} cells in" in good.output
    assert "!" not in good.output
    monkeypatch.setattr(scale, "HIGHEST", 0.5)
    monkeypatch.setattr(scale, "PROMISED_S", 0.0)
    bad = CliRunner().invoke(scale.main, ["--world", "24"], env={"COLUMNS": "150"})
    assert bad.output.count("!") == len(scale.FORMULAS) + 1


def test_the_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(scale, "PLOTTED_RANKS", (3, 6))
    scale.draw(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
