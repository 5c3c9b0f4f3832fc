"""A daemon for the tests of a file, and a namespace of its own for each test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from asyncdist_server.serving.threaded import ThreadedServer, serve_in_thread

namespaces = (f"test-{index}" for index in itertools.count())


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedServer]:
    with serve_in_thread() as running:
        yield running


@pytest.fixture
def namespace() -> str:
    return next(namespaces)
