"""AddressBook: where all ranks listen, whole or in pieces, and the tree along which it is passed on."""

from __future__ import annotations

import msgpack
import pytest

from asyncdist.transport.addresses import MAX_ADDRESS_BYTES, PeerAddress
from asyncdist.transport.protocol.frame import MAX_CONTROL_BYTES
from asyncdist.world import address_book
from asyncdist.world.address_book import FAN_OUT, PIECE_BYTES, TOLD_AT_ONCE_BYTES, AddressBook, children_of, parent_of


@pytest.mark.parametrize("size", [1, 2, FAN_OUT, FAN_OUT + 1, FAN_OUT + 2, 100, 5000])
@pytest.mark.parametrize("root", [0, 1, -1])
def test_the_tree_reaches_every_rank_once_and_soon(size: int, root: int) -> None:
    root %= size
    reached, level, steps = {root}, [root], 0
    while level:
        below = [child for rank in level for child in children_of(rank, root, size)]
        for rank in level:
            for child in children_of(rank, root, size):
                assert parent_of(child, root, size) == rank
        assert not reached & set(below)
        assert len(below) == len(set(below))
        reached |= set(below)
        level, steps = below, steps + 1
    assert reached == set(range(size))
    assert steps <= 6
    assert parent_of(root, root, size) == root


def test_a_book_in_pieces_is_whole_in_the_end() -> None:
    packed = [PeerAddress(f"host {rank}").to_bytes() for rank in range(3000)]
    book, other = AddressBook(3000, packed), AddressBook(3000)
    assert book.complete
    pieces = list(book.pieces())
    assert len(pieces) > 1
    for first, addresses in reversed(pieces):
        assert not other.complete
        other.learn(first, addresses)
        other.learn(first, addresses)  # known already, from the store
    assert other.complete
    assert other.packed() == packed
    assert other.get(2999) == PeerAddress("host 2999")


def test_pieces_of_the_longest_addresses_fit_a_control_message() -> None:
    book = AddressBook(100, [bytes(MAX_ADDRESS_BYTES)] * 100)
    for first, addresses in book.pieces():
        assert len(msgpack.packb(["addresses", first, addresses])) <= MAX_CONTROL_BYTES
        assert sum(map(len, addresses)) <= PIECE_BYTES
    assert list(AddressBook(1, [bytes(PIECE_BYTES + 1)]).pieces()) == [(0, [bytes(PIECE_BYTES + 1)])]


@pytest.mark.parametrize("over", [0, 1])
def test_how_much_the_store_tells_each_rank(over: int) -> None:
    book = AddressBook(2, [bytes(TOLD_AT_ONCE_BYTES - 1), bytes(1 + over)])
    assert book.told_at_once is not bool(over)


def test_one_rank_more_than_a_rank_tells_is_told_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_book, "FAN_OUT", 2)
    assert [children_of(rank, 0, 4) for rank in range(4)] == [[1, 2], [3], [], []]
    assert [children_of(rank, 3, 4) for rank in range(4)] == [[2], [], [], [0, 1]]
