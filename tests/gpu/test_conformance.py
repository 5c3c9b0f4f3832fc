"""The real CUDA and NCCL pass the checks that the fakes pass, so that what is tested on the fakes holds for them."""

from __future__ import annotations

import pytest
from cuda_conformance import CUDA_CHECKS, CudaCheck
from gpu_kit import on_gpu
from nccl_conformance import NCCL_CHECKS, NcclCheck

from bench.gpu import Gpu

pytestmark = on_gpu


@pytest.mark.parametrize("check", CUDA_CHECKS, ids=lambda check: check.__name__)
def test_runtime(check: CudaCheck, gpu: Gpu) -> None:
    check(gpu.runtime)


@pytest.mark.parametrize("check", NCCL_CHECKS, ids=lambda check: check.__name__)
def test_nccl(check: NcclCheck, gpu: Gpu) -> None:
    assert gpu.provider.nccl is not None, gpu.provider.nccl_reason
    check(gpu.runtime, gpu.provider.nccl)
