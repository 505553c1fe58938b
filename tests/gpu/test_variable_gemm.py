"""Memory limits of the variable-sized GEMM table, where torch's allocator keeps them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.gemm_cases import PAIR
from benchmarks.gemm_runs import Run, run
from bexp.explorer.spec.model import DType

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

UNEVEN = replace(PAIR[1], shrink=4)
NEEDED = UNEVEN.operand_bytes(2, training=True)


def _run(contender: str, limit_bytes: int | None) -> dict[str, Any]:
    found = run(Run(UNEVEN, DType.BFLOAT16, contender, "cuda:0", limit_bytes, timed=False))
    assert isinstance(found, dict)
    return found


def test_padding_that_does_not_fit_is_out_of_memory_and_harms_nobody() -> None:
    limit = NEEDED * 3 // 2  # padded to the largest expert, rows take twice as much
    limited = _run("bmm", limit)
    assert limited["training"]["outcome"] == "out_of_memory"
    assert limited["forward"]["outcome"] == "ok"
    assert _run("loop", limit)["training"]["outcome"] == "ok"
    whole = _run("bmm", None)
    assert whole["training"]["outcome"] == "ok"
    assert whole["training"]["peak_bytes"] > limit


def test_operands_that_just_fit_do() -> None:
    found = _run("loop", NEEDED + (64 << 20))
    assert found["training"]["outcome"] == "ok"
    assert NEEDED <= found["training"]["peak_bytes"] <= NEEDED + (64 << 20)
    assert _run("loop", NEEDED - 1)["training"]["outcome"] == "operands_exceed_limit"
