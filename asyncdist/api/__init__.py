"""The functions of torch.distributed, natively awaitable, and those beyond; each acts on a group or the default one.

A function that communicates says in its docstring all that its caller must know. The docstring ends with `AWAITED` or,
where cancelling can withdraw the operation, with `WITHDRAWN`; `asyncdist.blocking` puts its own words there.
"""

from typing import Final

__all__ = ["AWAITED", "WITHDRAWN"]

AWAITED: Final = """\
Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; cancelling a
waiter ends only its waiting."""

WITHDRAWN: Final = """\
Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; when the last
waiter is cancelled before message and receive have matched, it is withdrawn, and no other message is lost."""
