"""Settings that make no sense are refused before anything starts."""

from __future__ import annotations

import math

import pytest

from asyncdist_server.serving.config import ConfigError, ServerConfig


@pytest.mark.parametrize("wrong", [-0.1, math.inf, math.nan])
def test_times_that_may_be_none(wrong: float) -> None:
    config = ServerConfig(drain_timeout_s=0.0, torch_linger_s=0.0)
    assert config.drain_timeout_s == config.torch_linger_s == 0.0
    with pytest.raises(ConfigError, match="the drain time-out must be a number of seconds"):
        ServerConfig(drain_timeout_s=wrong)
    with pytest.raises(ConfigError, match="the linger time of torch keys must be"):
        ServerConfig(torch_linger_s=wrong)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan])
def test_times_that_must_be_some(wrong: float) -> None:
    with pytest.raises(ConfigError, match="the handshake time-out must be a positive number"):
        ServerConfig(handshake_timeout_s=wrong)
    with pytest.raises(ConfigError, match="the stall time-out must be a positive number"):
        ServerConfig(stall_timeout_s=wrong)
