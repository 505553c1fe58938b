"""Which kernels a GPU must serve. Other tests skip what is refused: one that no longer compiles would pass them.

It needs Triton, and on a Hopper GPU its Gluon, as torch installs them there.
"""

from __future__ import annotations

import pytest
import torch

from bexp.kernels.attention import attention_backend
from bexp.kernels.experts.fused.hopper_support import has_hopper_kernels
from bexp.kernels.experts.registry import expert_backend
from bexp.kernels.triton_support import triton_reason
from tests.gpu.needs import one_gpu
from tests.gpu.test_kernels import attention_shape, experts_shape

pytestmark = one_gpu()

CUDA = torch.device("cuda")
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def test_triton_serves_every_gpu_since_ampere() -> None:
    assert (triton_reason(CUDA) is None) == (torch.cuda.get_device_capability() >= (8, 0))


@pytest.mark.parametrize("name", ["grouped_mm", "loop", "bmm", "fused", "hopper_grouped"])
def test_a_hopper_gpu_has_every_explored_expert_kernel(name: str) -> None:
    reason = expert_backend(name).unsupported_reason(experts_shape(), CUDA)
    assert reason is None if IS_HOPPER or name != "hopper_grouped" else reason is not None


def test_the_fused_experts_have_their_hopper_kernels_on_hopper_alone() -> None:
    assert has_hopper_kernels(CUDA) == IS_HOPPER


@pytest.mark.parametrize("name", ["flash", "efficient", "math", *(["cudnn"] if IS_HOPPER else [])])
def test_every_attention_kernel_is_served(name: str) -> None:
    assert attention_backend(name).unsupported_reason(attention_shape(), CUDA) is None
