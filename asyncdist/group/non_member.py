"""NonMember: what `new_group` gives to ranks that are not in the group."""

from __future__ import annotations

from collections.abc import Generator
from types import TracebackType
from typing import Any, NoReturn, Self

from asyncdist.group.process_group import ProcessGroup


class NonMember:
    """A group this rank does not belong to. Its operations raise ValueError; entering and closing it do nothing."""

    rank = -1
    size = -1
    closed = True

    def __init__(self, name: str, world_rank: int) -> None:
        self.name = name
        self._world_rank = world_rank

    def __repr__(self) -> str:
        return f"<NonMember of {self.name}, rank {self._world_rank}>"

    def __eq__(self, other: object) -> bool:
        """As torch's one NON_GROUP_MEMBER: comparing asks whether this rank is a member."""
        return isinstance(other, NonMember)

    def __hash__(self) -> int:
        return hash(NonMember)

    def refuse(self) -> NoReturn:
        """Raise the ValueError every operation raises."""
        raise ValueError(
            f"rank {self._world_rank} is not a member of this group ({self.name}): only members, whose group.rank is "
            "not -1, call its operations"
        )

    def __getattr__(self, name: str) -> Any:
        """Every operation of a group exists here too, and raises."""
        if name.startswith("_") or not callable(getattr(ProcessGroup, name, None)):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self._refused

    def _refused(self, *arguments: object, **options: object) -> NoReturn:
        self.refuse()

    async def close(self) -> None:
        """Nothing to close."""

    def __await__(self) -> Generator[Any, None, Self]:
        yield from ()
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None
