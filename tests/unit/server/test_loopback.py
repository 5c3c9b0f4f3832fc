"""Which addresses are of this host only."""

from __future__ import annotations

import pytest

from asyncdist_server.serving.sockets import is_loopback


@pytest.mark.parametrize("ip", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "::1%lo"])
def test_loopback(ip: str) -> None:
    assert is_loopback(ip)


@pytest.mark.parametrize("ip", ["10.0.0.1", "0.0.0.0", "::", "fe80::1%eth0", "::ffff:10.0.0.1"])
def test_addresses_that_others_reach(ip: str) -> None:
    assert not is_loopback(ip)


@pytest.mark.parametrize("text", ["localhost", "", "127.0.0.1:80"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="IPv4 or IPv6"):
        is_loopback(text)
