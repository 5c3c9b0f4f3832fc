"""What every store must do, as checks that run on any of them.

    from asyncdist.testing.store_conformance import STORE_CHECKS

    @pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
    async def test_my_store(check):
        await check(open_my_store)

`open_my_store` is an async function that opens one more client of the same store, which is empty when the check begins.
A check opens a few clients, closes them, and returns or raises AssertionError (or what the store raised). It needs no
test framework. Checks wait for conditions, never for fixed times, except where a time-out is what they check.
"""

from __future__ import annotations

from typing import Final

from asyncdist.testing.store_check_tools import OpenStore, StoreCheck
from asyncdist.testing.store_verb_checks import VERB_CHECKS
from asyncdist.testing.store_wait_checks import WAIT_CHECKS

__all__ = ["STORE_CHECKS", "OpenStore", "StoreCheck"]

STORE_CHECKS: Final[tuple[StoreCheck, ...]] = (*VERB_CHECKS, *WAIT_CHECKS)
"""Every check; each takes an `OpenStore` of a store that is empty."""
