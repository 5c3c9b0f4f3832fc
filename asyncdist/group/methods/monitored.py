"""monitored_barrier: a barrier that finds out who did not come."""

from __future__ import annotations

from typing import Any, Final

from asyncdist.collectives.arguments import call
from asyncdist.concurrency.deadline import INHERIT, Timeout, timeout_seconds
from asyncdist.group.deadlines import MONITORED_BARRIER, PROBE_S
from asyncdist.group.methods.issuer import Issuer
from asyncdist.group.point_to_point import check_tag
from asyncdist.work import Work

__all__ = ["VERDICT_S", "Monitored"]

VERDICT_S: Final = 2 * PROBE_S
"""How much longer the other ranks wait than the first, so that its verdict, which needs PROBE_S, comes first."""


class Monitored(Issuer):
    """See the module."""

    timeout_s: float | None

    def monitored_barrier(self, timeout: Timeout = INHERIT, wait_all_ranks: bool = False, *, tag: int = 0) -> Work[Any]:
        """Done once every rank has called it; when `timeout` expires, the error names all ranks that have not.

        The group's first rank asks all others then, connected or not, and its verdict is every rank's
        CollectiveTimeoutError, whose `missing` are their global ranks; the group is aborted. Where the first rank
        itself does not come, the others say so `VERDICT_S` later. Other collectives name who is missing as well, but
        in groups of more than 256 ranks only as far as ranks are connected.

        `wait_all_ranks` is torch's choice between the first missing rank and all; here it is always all.
        """
        try:
            timeout_s = self.timeout_s if timeout is INHERIT else timeout_seconds(timeout, None)
        except (TypeError, ValueError) as error:
            self.refuse(MONITORED_BARRIER, check_tag(tag), error)
            raise
        if timeout_s is not None and self.rank != 0:
            timeout_s += VERDICT_S
        return self._collective(MONITORED_BARRIER, tag, timeout_s, call.monitored_barrier)
