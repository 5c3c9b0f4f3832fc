"""What the checks of stores, meshes and devices share."""

from __future__ import annotations

import pytest

from asyncdist.testing import STORE_CHECKS
from asyncdist.testing.store_conformance import checks_of, expect_refused


def public_one() -> None:
    """Not called."""


def public_with(open_store: object) -> None:
    """Not called."""


def _private() -> None:
    """Not called."""


def test_checks_are_the_public_functions_of_the_module_itself_in_order() -> None:
    found = checks_of(__name__)
    assert found[0] is public_one
    assert _private not in found
    assert public_with not in found
    assert checks_of(__name__, "open_store") == (public_with,)
    assert expect_refused not in found
    assert found[1] is test_checks_are_the_public_functions_of_the_module_itself_in_order


def test_checks_of_stores_come_in_the_order_of_their_lines() -> None:
    lines = [check.__code__.co_firstlineno for check in STORE_CHECKS]
    assert lines == sorted(lines)
    assert len(STORE_CHECKS) > 30


def test_a_call_that_does_not_raise_is_no_refusal() -> None:
    expect_refused(ValueError, lambda: int("x"), lambda: int("y"))
    with pytest.raises(AssertionError, match="expected a ValueError at the call"):
        expect_refused(ValueError, lambda: int("x"), lambda: int("1"))
    with pytest.raises(TypeError):
        expect_refused(ValueError, lambda: int([]))  # type: ignore[call-overload]
