"""Process groups: how operations are issued, and what a group keeps of them.

`asyncdist.group.WORLD` is what torch scripts write for the default group, wherever a `group=` is taken.
"""

from typing import Final

__all__ = ["WORLD"]

WORLD: Final = None
