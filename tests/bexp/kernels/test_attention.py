from __future__ import annotations

import pytest
import torch

from bexp.kernels.attention import attention_backend, attention_support, default_attention_backend
from bexp.kernels.shapes import AttentionShape
from tests.bexp.kernels import references

CPU = torch.device("cpu")


def attention_shape(dtype: torch.dtype = torch.float32) -> AttentionShape:
    return AttentionShape(num_heads=4, num_query_groups=2, head_size=16, dtype=dtype, seq_length=32)


@pytest.mark.parametrize("name", ["flash", "math"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_output_and_gradients(name: str, groups: int, dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 33, 16), (2, groups, 33, 16), (2, groups, 33, 16)]
    data = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    q, k, v = inputs = references.leaves(data, dtype)
    q64, k64, v64 = wanted_inputs = references.leaves(data)
    out, wanted = attention_backend(name).run(q, k, v), references.attention(q64, k64, v64)
    gradient = torch.randn(out.shape, generator=generator).to(dtype)
    out.backward(gradient)
    wanted.backward(gradient.double())
    assert references.relative_error(out, wanted) <= tolerance
    for actual, expected in zip(inputs, wanted_inputs, strict=True):
        assert references.relative_error(actual.grad, expected.grad) <= tolerance


def test_support_on_cpu_says_why_not() -> None:
    support = {s.name: s for s in attention_support(attention_shape(), CPU)}
    assert {name for name, s in support.items() if s.usable} == {"flash", "math"}
    assert support["cudnn"].reason == "cuDNN attention needs a CUDA device, not cpu"
    assert support["efficient"].reason == "memory-efficient attention needs a CUDA device, not cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_default_is_what_torch_would_pick(dtype: torch.dtype) -> None:
    assert default_attention_backend(attention_shape(dtype=dtype), CPU) == "flash"


def test_the_default_without_torchs_own_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_fused_sdp_choice")
    assert default_attention_backend(attention_shape(), CPU) == "flash"


def test_an_unknown_back_end_is_named() -> None:
    with pytest.raises(ValueError, match="unknown attention back end 'fa9'"):
        attention_backend("fa9")
