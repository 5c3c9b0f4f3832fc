"""Plans with one mistake planted: each kind of mistake that an algorithm's author could make."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from asyncdist.plan.steps import (
    Buffer,
    Copy,
    Fetch,
    FetchReduce,
    Plan,
    Publish,
    Recv,
    RecvReduce,
    Reduce,
    Send,
    Slice,
    Step,
    Symmetry,
)

__all__ = ["CLAIMS", "MISTAKES", "plant"]

Mistake = Callable[[list[Step], random.Random, int], list[Step] | None]
"""(steps, rng, world) -> the steps with a mistake, or None if there is no place for it."""

MESSAGES = (Send, Recv, RecvReduce)
FETCHES = (Fetch, FetchReduce)
FROM_PEERS = (*MESSAGES, *FETCHES)


def plant(plans: Sequence[Plan], rank: int, mistake: Mistake, rng: random.Random) -> list[Plan] | None:
    """Return the plans with the mistake made by `rank`, or None; nothing is claimed of rotation any more."""
    steps = mistake(list(plans[rank].steps), rng, plans[rank].world)
    if steps is None or tuple(steps) == plans[rank].steps:
        return None
    result = [replace(plan, symmetry=Symmetry.NONE) for plan in plans]
    result[rank] = replace(result[rank], steps=tuple(steps))
    return result


def choose(steps: list[Step], rng: random.Random, *kinds: type) -> int | None:
    """Index of one of the steps of these kinds."""
    found = [index for index, step in enumerate(steps) if isinstance(step, kinds)]
    return rng.choice(found) if found else None


def changed(steps: list[Step], index: int | None, **changes: Any) -> list[Step] | None:
    """Return the steps with one changed."""
    if index is None:
        return None
    steps[index] = replace(steps[index], **changes)
    return steps


def pieces(step: Step) -> list[str]:
    """Names of the slices of a step."""
    return [name for name in ("source", "target") if hasattr(step, name)]


def drop_step(steps: list[Step], rng: random.Random, world: int) -> list[Step] | None:
    """A step is forgotten."""
    if not steps:
        return None
    index = rng.randrange(len(steps))
    return [
        replace(step, after=tuple(other - (other > index) for other in step.after if other != index))
        for number, step in enumerate(steps)
        if number != index
    ]


def drop_edge(steps: list[Step], rng: random.Random, world: int) -> list[Step] | None:
    """A step does not wait for another one."""
    waiting = [index for index, step in enumerate(steps) if step.after]
    if not waiting:
        return None
    index = rng.choice(waiting)
    dropped = rng.choice(steps[index].after)
    return changed(steps, index, after=tuple(other for other in steps[index].after if other != dropped))


def wait_for_nothing(steps: list[Step], rng: random.Random, world: int) -> list[Step] | None:
    """A step waits for nothing."""
    waiting = [index for index, step in enumerate(steps) if step.after]
    return changed(steps, rng.choice(waiting), after=()) if waiting else None


def wait_too_much(steps: list[Step], rng: random.Random, world: int) -> list[Step] | None:
    """A step waits for another one, perhaps one that cannot be done before it."""
    if len(steps) < 2:
        return None
    index = rng.randrange(1, len(steps))
    return changed(steps, index, after=tuple(sorted({*steps[index].after, rng.randrange(index)})))


def wrong_peer(steps: list[Step], rng: random.Random, world: int) -> list[Step] | None:
    """A message to, or from, another rank; another rank's item."""
    return changed(steps, choose(steps, rng, *FROM_PEERS), peer=rng.randrange(-1, world + 1))


def swap_peers(steps: list[Step], rng: random.Random, world: int) -> list[Step] | None:
    """Two messages go to each other's rank."""
    first, second = choose(steps, rng, *FROM_PEERS), choose(steps, rng, *FROM_PEERS)
    if first is None or second is None:
        return None
    peers = steps[first].peer, steps[second].peer  # type: ignore[union-attr]
    return changed(changed(steps, first, peer=peers[1]) or steps, second, peer=peers[0])


def wrong_slot(steps: list[Step], rng: random.Random, world: int) -> list[Step] | None:
    """A message has another one's slot."""
    index = choose(steps, rng, *MESSAGES)
    return None if index is None else changed(steps, index, slot=steps[index].slot + rng.choice((-1, 1)))  # type: ignore[union-attr]


def swap_slots(steps: list[Step], rng: random.Random, world: int) -> list[Step] | None:
    """Two messages have each other's slot."""
    index = choose(steps, rng, *MESSAGES)
    alike = [
        other
        for other, step in enumerate(steps)
        if index is not None
        and isinstance(step, MESSAGES)
        and isinstance(step, Send) == isinstance(steps[index], Send)
        and step.peer == steps[index].peer  # type: ignore[union-attr]
    ]
    if index is None:
        return None
    other = rng.choice(alike)
    slots = steps[index].slot, steps[other].slot  # type: ignore[union-attr]
    return changed(changed(steps, index, slot=slots[1]) or steps, other, slot=slots[0])


def shift(steps: list[Step], rng: random.Random, world: int) -> list[Step] | None:
    """An offset is wrong by one."""
    return _piece(steps, rng, lambda piece: Slice(piece.buffer, piece.offset + rng.choice((-1, 1)), piece.length))


def stretch(steps: list[Step], rng: random.Random, world: int) -> list[Step] | None:
    """A length is wrong by one."""
    return _piece(steps, rng, lambda piece: Slice(piece.buffer, piece.offset, piece.length + rng.choice((-1, 1))))


def wrong_buffer(steps: list[Step], rng: random.Random, world: int) -> list[Step] | None:
    """Another buffer is meant."""
    return _piece(steps, rng, lambda piece: Slice(rng.choice(list(Buffer)), piece.offset, piece.length))


def _piece(steps: list[Step], rng: random.Random, change: Callable[[Slice], Slice]) -> list[Step] | None:
    if not steps:
        return None
    index = rng.randrange(len(steps))
    name = rng.choice(pieces(steps[index]))
    return changed(steps, index, **{name: change(getattr(steps[index], name))})


def swap_chunks(steps: list[Step], rng: random.Random, world: int) -> list[Step] | None:
    """Two steps of a kind take each other's elements."""
    index = choose(steps, rng, Send, Recv, RecvReduce, Reduce, Copy, Publish, *FETCHES)
    if index is None:
        return None
    name = rng.choice(pieces(steps[index]))
    other = rng.choice([number for number, step in enumerate(steps) if type(step) is type(steps[index])])
    slices = getattr(steps[index], name), getattr(steps[other], name)
    return changed(changed(steps, index, **{name: slices[1]}) or steps, other, **{name: slices[0]})


def flip(steps: list[Step], rng: random.Random, world: int) -> list[Step] | None:
    """Operands of a reduction change sides."""
    index = choose(steps, rng, RecvReduce, Reduce, FetchReduce)
    if index is None:
        return None
    names = {Reduce: "source_left", RecvReduce: "incoming_left", FetchReduce: "item_left"}
    name = names[type(steps[index])]
    return changed(steps, index, **{name: not getattr(steps[index], name)})


def repeat(steps: list[Step], rng: random.Random, world: int) -> list[Step] | None:
    """A step is done again at the end: a message sent twice, an operand reduced twice, elements written twice."""
    if not steps:
        return None
    index = rng.randrange(len(steps))
    return [*steps, replace(steps[index], after=tuple(range(len(steps))))]


def repeat_message(steps: list[Step], rng: random.Random, world: int) -> list[Step] | None:
    """A message is sent, or expected, once more."""
    index = choose(steps, rng, *MESSAGES)
    if index is None:
        return None
    return [*steps, replace(steps[index], slot=steps[index].slot + 1000, after=tuple(range(len(steps))))]  # type: ignore[union-attr, arg-type]


def forget_to_reduce(steps: list[Step], rng: random.Random, world: int) -> list[Step] | None:
    """What should be reduced replaces what is there, or the other way round."""
    index = choose(steps, rng, Recv, RecvReduce, Reduce, Copy, *FETCHES)
    if index is None:
        return None
    match steps[index]:
        case Recv(peer, target, slot, after):
            steps[index] = RecvReduce(peer, target, slot, rng.random() < 0.5, after)
        case RecvReduce(peer, target, slot, _, after):
            steps[index] = Recv(peer, target, slot, after)
        case Reduce(source, target, _, after):
            steps[index] = Copy(source, target, after)
        case Fetch(peer, item, offset, target, after):
            steps[index] = FetchReduce(peer, item, offset, target, rng.random() < 0.5, after)
        case FetchReduce(peer, item, offset, target, _, after):
            steps[index] = Fetch(peer, item, offset, target, after)
        case Copy(source, target, after):
            steps[index] = Reduce(source, target, rng.random() < 0.5, after)
    return steps


def too_early(steps: list[Step], rng: random.Random, world: int) -> list[Step] | None:
    """A step comes before the one it follows, as if written down in the wrong order."""
    if len(steps) < 2:
        return None
    index = rng.randrange(1, len(steps))
    first, second = steps[index - 1], steps[index]
    moved = tuple(other for other in second.after if other != index - 1)
    places = {index - 1: index, index: index - 1}
    after = tuple(sorted({*first.after, index - 1})) if moved != second.after else first.after
    rest = [
        replace(step, after=tuple(sorted(places.get(other, other) for other in step.after)))
        for step in steps[index + 1 :]
    ]
    return [*steps[: index - 1], replace(second, after=moved), replace(first, after=after), *rest]


def wrong_item(steps: list[Step], rng: random.Random, world: int) -> list[Step] | None:
    """An item has another one's number, or another one is fetched."""
    index = choose(steps, rng, Publish, *FETCHES)
    return None if index is None else changed(steps, index, item=steps[index].item + rng.choice((-1, 1)))  # type: ignore[union-attr]


def wrong_part(steps: list[Step], rng: random.Random, world: int) -> list[Step] | None:
    """Another part of an item is fetched."""
    index = choose(steps, rng, *FETCHES)
    return None if index is None else changed(steps, index, offset=steps[index].offset + rng.choice((-1, 1)))  # type: ignore[union-attr]


def swap_items(steps: list[Step], rng: random.Random, world: int) -> list[Step] | None:
    """Two steps put out, or fetch, each other's item."""
    index = choose(steps, rng, Publish, *FETCHES)
    if index is None:
        return None
    other = rng.choice([number for number, step in enumerate(steps) if type(step) is type(steps[index])])
    items = steps[index].item, steps[other].item  # type: ignore[union-attr]
    return changed(changed(steps, index, item=items[1]) or steps, other, item=items[0])


def publish_more(steps: list[Step], rng: random.Random, world: int) -> list[Step] | None:
    """Something is published that nobody fetches."""
    found = [step for step in steps if isinstance(step, Publish)]
    return [*steps, replace(found[-1], item=len(found), after=tuple(range(len(steps))))] if found else None


def claim_shield(steps: list[Step], rng: random.Random, world: int) -> list[Step] | None:
    """An item is called shielded."""
    return changed(steps, choose(steps, rng, Publish), shielded=True)


MISTAKES: tuple[Mistake, ...] = (
    drop_step,
    drop_edge,
    wait_for_nothing,
    wait_too_much,
    wrong_peer,
    swap_peers,
    wrong_slot,
    swap_slots,
    shift,
    stretch,
    wrong_buffer,
    swap_chunks,
    flip,
    repeat,
    repeat_message,
    forget_to_reduce,
    too_early,
    wrong_item,
    wrong_part,
    swap_items,
    publish_more,
    claim_shield,
)

CLAIMS: dict[str, Any] = {"symmetry": Symmetry.ROTATION, "block_aligned": True, "ordered": True}
"""What a plan may say of itself."""
