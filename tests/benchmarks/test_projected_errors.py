from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from benchmarks.gemm_contenders import BASELINES, GemmPasses, Operands, Problem, errors, problem
from benchmarks.projected_errors import is_within, projected_errors, reference
from bexp.kernels.experts.comparisons.block_sparse import BLOCK

CPU = torch.device("cpu")
COUNTS = (50, 0, 90, 20)


def _passed(given: Problem, name: str = "loop") -> tuple[Operands, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    operands = BASELINES[name](given)
    passes = GemmPasses(operands)
    passes.forward()
    passes.backward()
    assert passes.output is not None
    assert operands.x.grad is not None
    assert operands.w.grad is not None
    return operands, passes.output.detach(), (operands.x.grad, operands.w.grad)


@pytest.mark.parametrize("name", BASELINES)
def test_estimates_are_those_of_the_whole_comparison(name: str) -> None:
    given = problem(COUNTS, 64, 96, torch.bfloat16, CPU)
    operands, out, grads = _passed(given, name)
    found = projected_errors(reference(given), operands, out, grads)
    exact = errors(GemmPasses(operands), given)
    assert found == pytest.approx(exact, rel=0.15)
    assert is_within(found, 1e-2)
    assert not is_within(found, 1e-4)


@pytest.mark.parametrize("wrong", ["out", "x", "w"])
@pytest.mark.parametrize("value", [100.0, math.nan])
def test_a_single_wrong_number_is_seen(wrong: str, value: float) -> None:
    given = problem(COUNTS, 64, 96, torch.float32, CPU)
    operands, out, grads = _passed(given)
    {"out": out, "x": grads[0], "w": grads[1]}[wrong].view(-1)[-1] = value
    found = projected_errors(reference(given), operands, out, grads)
    assert not is_within(found, 1e-2)
    others = {name: error for name, error in found.items() if name != wrong}
    assert is_within(others, 1e-5)


def test_rows_are_found_in_blocks() -> None:
    """Laid out as a block-sparse matrix, with padded rows, of which nothing must be read."""
    given = problem((100, 60), 64, 2 * BLOCK, torch.float32, CPU)
    operands, out, _ = _passed(given)
    rows = torch.cat([torch.arange(100), BLOCK + torch.arange(60)])
    padded = torch.full((2 * BLOCK, 2 * BLOCK), math.nan).index_copy(0, rows, out)
    blocks = padded.view(2, BLOCK, 2, BLOCK).transpose(1, 2).reshape(-1, BLOCK, BLOCK)
    blocked = replace(operands, x=torch.zeros(2 * BLOCK, 64), rows=rows)
    assert projected_errors(reference(given), blocked, blocks, None)["out"] <= 1e-5
