"""What is used of torch for arrays on a GPU and for comparison exists and takes our arguments; needs no device."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

LIMIT_S = 120.0

PROGRAM = """
import inspect, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as torch_dist

tensor = torch.ones(4)
for name in ("data_ptr", "get_device", "is_conj", "is_neg", "is_contiguous"):
    getattr(tensor, name)()
assert tensor.layout is torch.strided and tensor.is_cuda is False and tensor.device.type == "cpu"
assert str(torch.bfloat16) == "torch.bfloat16"
inspect.signature(torch.cuda.current_stream).bind(tensor.device)
inspect.signature(torch.cuda.synchronize).bind()
assert torch.cuda.is_available() in (True, False)
inspect.signature(torch_dist.init_process_group).bind("nccl", store=torch_dist.HashStore(), rank=0, world_size=1)
inspect.signature(torch_dist.all_reduce).bind(tensor, async_op=True)
inspect.signature(torch_dist.destroy_process_group).bind()
torch_dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)
work = torch_dist.all_reduce(tensor, async_op=True)
assert work.wait() in (None, True)
assert torch_dist.is_initialized()
torch_dist.destroy_process_group()
print("fine")
"""
"""Beside NCCL it is used as beside gloo here: by one rank, with a store of its own."""


@pytest.mark.slow("imports torch")
def test_torch_is_what_we_take_it_for() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["fine"]
