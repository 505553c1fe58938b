"""Back ends that call other packages, with stand-ins for these; tests/gpu/test_named_experts.py runs their own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bexp.kernels.experts import deepgemm, liger, package, sonicmoe
from bexp.kernels.experts.expert_backend import ExpertBackend
from bexp.kernels.experts.grouped_ffn import grouped_ffn
from bexp.kernels.experts.loop import grouped_gemm
from bexp.kernels.experts.rows import sorted_rows
from tests.bexp.kernels import expert_cases, references
from tests.bexp.kernels.test_experts import experts_shape

CPU = torch.device("cpu")
GATED_SILU = tuple(case for case in expert_cases.CASES if case.gated and case.activation == "silu")
BLOCK = 8


def plainly(x: Tensor, routes: Tensor, weights: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The experts of matrices (E, 2H, D) and (E, D, H)."""
    rows = sorted_rows(routes.long(), first.shape[0], count=True)
    return grouped_ffn(x, weights, first.mT, second.mT, "silu", rows, grouped_gemm)


class _Liger:
    @staticmethod
    def apply(x: Tensor, first: Tensor, second: Tensor, routes: Tensor, weights: Tensor) -> Tensor:
        assert routes.dtype is torch.int32
        assert first.is_contiguous()
        assert second.is_contiguous()
        return plainly(x, routes, weights, first, second)


def _sonicmoe(
    x: Tensor,
    scores: Tensor,
    tokens: Tensor,
    experts: Tensor,
    first: Tensor,
    _first_bias: None,
    second: Tensor,
    _second_bias: None,
    *,
    E: int,
    concat_layout: bool,
    activation_type: str,
    **_: Any,
) -> tuple[Tensor, None]:
    assert activation_type == "swiglu"
    assert concat_layout
    assert (tokens.diff() >= 0).all(), "sorted"
    assert first.shape[2] == second.shape[2] == E
    first, second = (w.permute(2, 0, 1) for w in (first, second))
    assert first.is_contiguous()
    assert second.is_contiguous()
    shape = x.shape[0], -1
    return plainly(x, experts.view(shape), scores.view(shape).to(x.dtype), first, second), None


class _DeepGemm(ModuleType):
    """deep_gemm's products, each block of rows by the matrix of its first row's expert."""

    @staticmethod
    def get_mk_alignment_for_contiguous_layout() -> int:
        return BLOCK

    @staticmethod
    def m_grouped_bf16_gemm_nn_contiguous(x: Tensor, w: Tensor, out: Tensor, experts: Tensor) -> None:
        assert w.is_contiguous()
        for start in range(0, x.shape[0], BLOCK):
            assert len(set(experts[start : start + BLOCK].tolist())) == 1
            out[start : start + BLOCK] = x[start : start + BLOCK] @ w[experts[start]]

    @classmethod
    def m_grouped_bf16_gemm_nt_contiguous(cls, x: Tensor, w: Tensor, out: Tensor, experts: Tensor) -> None:
        assert w.is_contiguous()
        cls.m_grouped_bf16_gemm_nn_contiguous(x, w.mT.contiguous(), out, experts)

    @staticmethod
    def k_grouped_bf16_gemm_tn_contiguous(
        a: Tensor, b: Tensor, out: Tensor, heights: Sequence[int], device_heights: Tensor, add: Tensor
    ) -> None:
        assert list(heights) == device_heights.tolist()
        assert all(height % BLOCK == 0 for height in heights)
        assert sum(heights) == a.shape[0] == b.shape[0]
        for sums, one, other in zip(out, a.split(list(heights)), b.split(list(heights)), strict=True):
            sums.add_(one.float().T @ other.float())
        assert add is out


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        "liger_kernel.ops.fused_moe": SimpleNamespace(LigerFusedMoEFunction=_Liger),
        "sonicmoe": SimpleNamespace(moe_general_routing_inputs=_sonicmoe),
        "sonicmoe.enums": SimpleNamespace(ActivationType=SimpleNamespace(SWIGLU="swiglu")),
        "deep_gemm": _DeepGemm("deep_gemm"),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("case", GATED_SILU, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", [liger.LIGER, sonicmoe.SONICMOE, deepgemm.DEEPGEMM], ids=lambda one: one.name)
def test_output_and_gradients(backend: ExpertBackend, case: expert_cases.ExpertCase, transposed: bool) -> None:
    routes, (x, weights, *matrices, grad) = expert_cases.problem(case, torch.float32, CPU)
    tensors = [x, weights, *(expert_cases.transposed_storage(w, transposed) for w in matrices), grad]
    found = expert_cases.run(backend, case, routes, tensors)
    for actual, wanted in zip(found, expert_cases.expected(case, routes, tensors), strict=True):
        assert references.relative_error(actual, wanted) <= 1e-5


@pytest.mark.parametrize("backend", [liger.LIGER, sonicmoe.SONICMOE, deepgemm.DEEPGEMM], ids=lambda one: one.name)
def test_no_tokens(backend: ExpertBackend) -> None:
    case = GATED_SILU[0]
    routes, (x, weights, w_in, w_out, _) = expert_cases.problem(case, torch.float32, CPU)
    assert backend.forward(x[:0], routes[:0], weights[:0], w_in, w_out, "silu").shape == (0, case.hidden)


@pytest.mark.parametrize("backend", [liger.LIGER, sonicmoe.SONICMOE], ids=lambda one: one.name)
def test_what_is_refused_and_why(backend: ExpertBackend) -> None:
    shape = experts_shape()
    for refused, part in (
        (replace(shape, gated=False), "not with a plain silu"),
        (replace(shape, activation="gelu"), "not with a gated gelu"),
        (experts_shape(dtype=torch.float32), "takes bfloat16 and float16, not float32"),
        (experts_shape(width=36), "expert_ffn_hidden_size to be a multiple of 8, not 36"),
        (shape, "CUDA device"),
    ):
        assert part in (backend.unsupported_reason(refused, CPU) or "")
    assert "takes bfloat16, not float16" in (
        deepgemm.DEEPGEMM.unsupported_reason(experts_shape(dtype=torch.float16), CPU) or ""
    )


def test_a_package_that_is_missing_or_broken_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert package.package_reason("no-such", ("no_such_package",)) == "no-such is not installed"
    assert package.package_reason("json", ("json", "json.nothing")) == (
        "json cannot be imported: ModuleNotFoundError: No module named 'json.nothing'"
    )
    assert package.package_reason("json", ("json",)) is None
