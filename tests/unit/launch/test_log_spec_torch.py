"""The same options mean the same to torchrun."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from torch_later import Later

from asyncdist.launch.logs import LogSpec, Streams, parse_streams

api: Any = Later("torch.distributed.elastic.multiprocessing.api")

VALUES = ("0", "1", "2", "3", "0:1,1:2", "1:3", "0:0,1:1")
FILTERS = (None, {0}, {1}, {0, 1}, {5})


@pytest.mark.parametrize("redirects", VALUES)
def test_every_combination_puts_the_same_streams_in_files_and_on_the_terminal(tmp_path: Path, redirects: str) -> None:
    for tee, shown in itertools.product(VALUES, FILTERS):
        specs: dict[str, Any] = {"redirects": api.Std.from_str(redirects), "tee": api.Std.from_str(tee)}
        torchs = api.DefaultLogsSpecs(log_dir=str(tmp_path), local_ranks_filter=shown, **specs).reify({0: {}, 1: {}})
        ours = LogSpec(
            redirects=parse_streams(redirects),
            tee=parse_streams(tee),
            shown_ranks=None if shown is None else frozenset(shown),
        )
        for rank in (0, 1):
            for stream, files, tails in (
                (Streams.OUT, torchs.stdouts, torchs.tee_stdouts),
                (Streams.ERR, torchs.stderrs, torchs.tee_stderrs),
            ):
                case = (redirects, tee, shown, rank, stream)
                assert (stream in ours.filed(rank)) == files[rank].endswith(".log"), case
                assert (stream in ours.shown(rank)) == (files[rank] == "" or rank in tails), case


@pytest.mark.parametrize("text", ["0", "3", "0:3,1:0,2:1,3:2", "4", "", "0:", "0:1,", "1,2", "0:4", "-1", "a"])
def test_the_same_texts_are_understood(text: str) -> None:
    try:
        expected = api.Std.from_str(text)
    except ValueError:
        with pytest.raises(ValueError, match="neither"):
            parse_streams(text)
    else:
        assert parse_streams(text) == expected
