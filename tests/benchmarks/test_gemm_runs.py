"""One run of a grouped GEMM: which cases there are, what is timed, and what each failure is called."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gemm_runs
from benchmarks.gemm_cases import OTHERS, PAIR, TELLING, UNEVEN, Case, split_at_random
from benchmarks.gemm_contenders import BASELINES, OURS, Operands, Problem
from benchmarks.gemm_runs import Run, run
from benchmarks.variable_gemm import DTYPES
from bexp.explorer.spec.model import DType

SMALL = Case(64, 1024, 128, 8, 3).shrunk(1024)


def _run(contender: str, **changes: Any) -> dict[str, Any]:
    found = run(replace(Run(SMALL, DType.FLOAT32, contender, "cpu"), **changes))
    assert isinstance(found, dict)
    return found


def _contender(multiply: Callable[[Problem], Callable[[Tensor, Tensor], Tensor]]) -> Callable[[Problem], Operands]:
    def build(given: Problem) -> Operands:
        x, w = given.x.detach().requires_grad_(), given.w.detach().requires_grad_()
        return Operands(x, w, given.grad, None, multiply(given))

    return build


def test_the_pair_has_as_many_rows() -> None:
    even, uneven = (case.counts for case in PAIR)
    assert uneven == UNEVEN
    assert sum(even) == sum(uneven) == 524_088
    assert max(even) - min(even) <= 1


@pytest.mark.parametrize("case", [*TELLING, *OTHERS], ids=lambda case: case.name)
def test_a_random_split_is_one_that_routing_can_give(case: Case) -> None:
    rows = case.num_sequences * case.sequence_length * case.top_k
    assert sum(case.counts) == rows
    assert len(case.counts) == case.num_experts
    assert max(case.counts) <= rows / case.top_k + 1
    assert case.counts == case.counts
    if case.top_k < case.num_experts:
        assert max(case.counts) > 1.5 * rows / case.num_experts


def test_an_impossible_split_is_refused() -> None:
    with pytest.raises(ValueError, match="no random split"):
        split_at_random(1000, 64, 63)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BASELINES)
def test_a_right_result_is_timed(name: str, dtype: DType) -> None:
    found = _run(name, dtype=dtype)
    assert found["training"]["outcome"] == found["forward"]["outcome"] == "ok"
    assert set(found["training"]["errors"]) == {"out", "x", "w"}
    assert 0 < found["forward"]["seconds"] < found["training"]["seconds"]
    assert "seconds" not in _run(name, dtype=dtype, timed=False)["training"]


def test_rows_that_are_never_written_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a good result filled just before would hide it, were it not for the poison."""

    def multiply(given: Problem) -> Callable[[Tensor, Tensor], Tensor]:
        def run(x: Tensor, w: Tensor) -> Tensor:
            out = torch.empty(x.shape[0], w.shape[2])
            start = 0
            for expert, count in enumerate(given.counts):
                wanted = max(0, count - (expert == 2))
                out[start : start + wanted] = x[start : start + wanted] @ w[expert]
                start += count
            return out

        return run

    monkeypatch.setitem(OURS, "forgetful", _contender(multiply))
    found = _run("forgetful")
    assert found["training"]["outcome"] == found["forward"]["outcome"] == "wrong"
    assert found["training"]["errors"]["out"] is None
    assert json.dumps(found, allow_nan=False)


def test_a_gradient_alone_that_is_wrong_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(given: Problem) -> Callable[[Tensor, Tensor], Tensor]:
        good = BASELINES["loop"](given).multiply
        return lambda x, w: good(x, w.detach()) + 0 * good(x, w) if x.requires_grad else good(x, w)

    monkeypatch.setitem(OURS, "constant", _contender(multiply))
    found = _run("constant")
    assert found["training"]["outcome"] == "wrong"
    assert found["training"]["errors"]["out"] <= 1e-5
    assert found["forward"]["outcome"] == "ok"


def test_memory_that_runs_out_is_an_outcome_of_these_passes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(given: Problem) -> Callable[[Tensor, Tensor], Tensor]:
        good = BASELINES["loop"](given).multiply

        def run(x: Tensor, w: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
            return good(x, w)

        return run

    monkeypatch.setitem(OURS, "large", _contender(multiply))
    found = _run("large")
    assert found["training"]["outcome"] == "out_of_memory"
    assert found["forward"]["outcome"] == "ok"
    assert found["forward"]["seconds"] > 0
    assert _run("loop")["training"]["outcome"] == "ok"


def test_a_refusal_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _run("cublas_grouped")
    assert found["training"] == {"outcome": "unsupported", "reason": "cuBLAS needs a CUDA device"}

    def multiply(given: Problem) -> Callable[[Tensor, Tensor], Tensor]:
        raise RuntimeError("only even sizes")

    monkeypatch.setitem(OURS, "picky", _contender(multiply))
    assert _run("picky")["training"] == {"outcome": "unsupported", "reason": "RuntimeError: only even sizes"}


def test_operands_that_alone_exceed_the_limit_are_too_large_for_everyone() -> None:
    size = SMALL.operand_bytes(4, training=True)
    for name in BASELINES:
        found = _run(name, limit_bytes=size - 1, timed=False)
        assert found["training"] == {"outcome": "operands_exceed_limit", "operand_bytes": size}
        assert found["forward"]["outcome"] == "ok"
        assert _run(name, limit_bytes=size, timed=False)["training"]["outcome"] == "ok"
        beside = _run(name, limit_bytes=size, context_bytes=1, timed=False)
        assert beside["training"]["outcome"] == "operands_exceed_limit"


def test_bytes_of_the_largest_case() -> None:
    rows, k, n = 64 * 1024 * 3, 4224, 4 * 4224
    assert TELLING[2].operand_bytes(2, training=False) == 2 * (rows * k + rows * n + 8 * k * n)
    assert TELLING[2].flops(training=True) == 3 * 2 * rows * k * n


def test_what_the_benchmark_alone_holds_does_not_count() -> None:
    given = gemm_runs._problem(SMALL, DType.FLOAT32, torch.device("cpu"))
    sizes = {name: gemm_runs._bytes(build(given)) for name, build in BASELINES.items()}
    own = 4 * sum(t.numel() for t in (given.x, given.w, given.grad))
    assert sizes["loop"] == sizes["grouped_mm"] == own
    rows, capacity = sum(given.counts), max(given.counts) * len(given.counts)
    padding = 4 * (capacity - rows) * (SMALL.k + SMALL.n)
    assert sizes["bmm"] == own + padding + 8 * rows
