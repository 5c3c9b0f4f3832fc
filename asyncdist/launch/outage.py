"""How long the job's store has been away: a job goes on without it, until it must be asked or a limit has passed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from asyncdist.errors import DistError, LaunchError

if TYPE_CHECKING:
    from asyncdist.store.base import Store

__all__ = ["Outage", "parse_outage"]

LOOK_S: Final = 2.0
"""Between two looks at the store, and how long one may take: clients stop connecting anew unless they are asked."""

_SILENT_S: Final = 5.0
"""A daemon is started again within this. People are told of what takes longer."""


class Outage:
    """Whether the store answers. `limit_s` is how long it may be away, `say` tells people."""

    def __init__(self, where: object, limit_s: float, say: Callable[[str], None], look_s: float = LOOK_S) -> None:
        self._where = where
        self._limit_s = limit_s
        self._say = say
        self._look_s = look_s
        self._since_s: float | None = None
        self._told = False
        self.restarts = 0
        """How often the store has come back without its data."""
        self._answers = asyncio.Event()
        self._answers.set()

    def on_data_lost(self) -> None:
        """The store has come back without its data."""
        self.restarts += 1

    async def answers(self, store: Store) -> bool:
        """Whether the store answers now."""
        return not await self._look(store)

    async def watch(self, store: Store, on_over: Callable[[str], None]) -> None:
        """Look at the store until cancelled; call `on_over(why)` once it has been away for longer than it may."""
        while True:
            away_s = await self._look(store)
            if away_s > self._limit_s:
                on_over(f"the store at {self._where} has been away for {away_s:.0f} s, which --store-outage forbids")
                return
            if away_s > _SILENT_S and not self._told:
                self._told = True
                self._say(f"the store at {self._where} does not answer; the job goes on while all nodes are well")
            await asyncio.sleep(min(self._look_s, max(0.0, self._limit_s - away_s)))

    async def wait(self, store: Store, timeout_s: float, hint: str = "") -> None:
        """Wait until the store answers. Raises LaunchError after `timeout_s`, or once it was away for the limit."""
        begun_s = _now()
        while away_s := await self._look(store):
            if not self._told:
                self._told = True
                self._say(f"the store at {self._where} does not answer; without it the nodes cannot meet: waiting")
            if away_s > self._limit_s or _now() - begun_s > timeout_s:
                raise LaunchError(
                    f"the connection to the job's store was lost: the store at {self._where} has not answered for "
                    f"{away_s:.0f} s{hint}"
                )
            await asyncio.sleep(min(self._look_s, 0.1 * timeout_s))

    async def over(self) -> None:
        """Wait, while `watch` looks, until the store answers again."""
        await asyncio.sleep(self._look_s)  # it may not have been found away yet
        await self._answers.wait()

    async def _look(self, store: Store) -> float:
        """Return for how many seconds the store has been away; 0 if it answers."""
        asked_s = _now()
        try:
            async with asyncio.timeout(self._look_s):
                await store.check(["launch"])
        except (DistError, TimeoutError):
            if self._since_s is None:
                self._since_s = asked_s
                self._answers.clear()
            return max(_now() - self._since_s, 1e-9)
        if self._told and self._since_s is not None:
            self._say(f"the store at {self._where} answers again, after {_now() - self._since_s:.0f} s")
        self._since_s, self._told = None, False
        self._answers.set()
        return 0.0


def parse_outage(text: str) -> float:
    """Turn `--store-outage` into seconds; `forever` is infinity. Raises ValueError for anything else."""
    if text.strip().lower() == "forever":
        return math.inf
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{text!r} is neither a number of seconds, 0 or more, nor forever")
    return seconds


def _now() -> float:
    return asyncio.get_running_loop().time()
