from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from bexp.kernels.experts.block_sparse.block_experts import BLOCK_SPARSE, block_sparse_ffn, dsd, sdd, transposed_dsd
from bexp.kernels.experts.block_sparse.topology import block_topology, blocked_rows
from bexp.kernels.experts.expert_backend import ExpertBackend
from bexp.kernels.selective_recompute import selective_recompute
from tests.bexp.kernels import expert_cases
from tests.bexp.kernels.references import relative_error
from tests.bexp.kernels.test_experts import experts_shape
from tests.bexp.kernels.triton_interpreter import accept_scalars_of_one_element, is_interpreting, run_in_interpreter

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(not is_interpreting(), reason="runs in the interpreter, which a child is started with")
BLOCK = 16
SMALL_BLOCKS = ExpertBackend("small blocks", False, lambda *_: None, partial(block_sparse_ffn, block=BLOCK))


@pytest.fixture(autouse=True)
def loops_with_loaded_bounds() -> None:
    if is_interpreting():
        accept_scalars_of_one_element()


@pytest.mark.skipif(is_interpreting(), reason="this is the child")
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def test_the_topology_is_block_diagonal() -> None:
    topology = block_topology((20, 0, 16), 32, BLOCK, CPU)
    assert topology.num_block_rows == 3
    assert topology.row_indices.tolist() == [0, 0, 1, 1, 2, 2]
    assert topology.column_indices.tolist() == [0, 1, 0, 1, 4, 5]
    assert topology.offsets.tolist() == [0, 2, 4, 6]
    assert topology.offsets_t.tolist() == [0, 2, 4, 4, 4, 5, 6]
    assert topology.blocks_t.tolist() == [0, 2, 1, 3, 4, 5]


def test_rows_are_padded_to_the_block_only() -> None:
    routes = torch.tensor([[0], [2], [0], [0]])
    rows = blocked_rows(routes, 3, 2)
    assert rows.counts == (3, 0, 1)
    assert rows.ends.tolist() == [4, 4, 6]
    assert rows.row_of_pair.tolist() == [0, 4, 1, 2]
    assert rows.token_of_row.tolist() == [0, 2, 3, 0, 1, 0]


def dense(values: Tensor, rows: Tensor, columns: Tensor, shape: tuple[int, int]) -> Tensor:
    """The sparse matrix with its zeros."""
    out = torch.zeros(shape, dtype=torch.float64)
    for value, i, j in zip(values.double(), rows.tolist(), columns.tolist(), strict=True):
        out[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK] = value
    return out


@interpreted
def test_the_products_of_the_dense_matrix() -> None:
    generator = torch.Generator().manual_seed(0)
    counts, width, k = (20, 0, 16), 32, 24
    topology = block_topology(counts, width, BLOCK, CPU)
    num_rows = topology.num_block_rows * BLOCK
    x = torch.randn(num_rows, k, generator=generator)
    w_in = torch.randn(3, k, width, generator=generator)
    w_out = torch.randn(3, width, k, generator=generator)
    values = torch.randn(topology.num_blocks, BLOCK, BLOCK, generator=generator)
    place = (topology.row_indices, topology.column_indices, (num_rows, 3 * width))
    sparse = dense(values, *place)
    mask = dense(torch.ones_like(values), *place)
    nan = float("nan")

    wide = w_in.transpose(0, 1).reshape(k, -1).double()
    out = torch.full_like(values, nan)
    assert relative_error(dense(sdd(x, w_in, topology, out=out), *place), (x.double() @ wide) * mask) <= 1e-5
    sdd(x, w_in.transpose(1, 2).contiguous(), topology, transposed=True, out=out.fill_(nan))
    assert relative_error(dense(out, *place), (x.double() @ wide) * mask) <= 1e-5

    rows = torch.full((num_rows, k), nan)
    assert relative_error(dsd(values, w_out, topology, out=rows), sparse @ w_out.reshape(-1, k).double()) <= 1e-5
    dsd(values, w_in, topology, transposed=True, out=rows.fill_(nan))
    assert relative_error(rows, sparse @ wide.T) <= 1e-5

    wanted = (sparse.T @ x.double()).view(3, width, k)
    assert relative_error(transposed_dsd(values, x, topology, torch.full_like(w_out, nan)), wanted) <= 1e-5
    transposed = transposed_dsd(values, x, topology, torch.full_like(w_in, nan), transposed=True)
    assert relative_error(transposed, wanted.transpose(1, 2)) <= 1e-5


@interpreted
@pytest.mark.parametrize("case", expert_cases.CASES, ids=lambda case: case.name)
def test_the_whole_ffn(case: expert_cases.ExpertCase) -> None:
    """Experts as wide as two blocks, whatever the case says."""
    if case.num_experts > 100:
        case = expert_cases.ExpertCase(case.name, case.num_tokens, 40, case.top_k)
    case = expert_cases.ExpertCase(**{**vars(case), "width": 2 * BLOCK})
    errors = expert_cases.errors(SMALL_BLOCKS, case, torch.float32, CPU)
    assert max(errors.values()) <= 1e-5, errors


@interpreted
@pytest.mark.parametrize("products", [False, True])
def test_discarded_blocks_come_back_the_same(products: bool) -> None:
    case = expert_cases.ExpertCase("discarded", 40, 4, 3, width=2 * BLOCK, skew=1.0)
    routes, tensors = expert_cases.problem(case, torch.float32, CPU)
    plain = expert_cases.run(SMALL_BLOCKS, case, routes, tensors)
    with selective_recompute(products=products):
        again = expert_cases.run(SMALL_BLOCKS, case, routes, tensors)
    assert all(torch.equal(a, b) for a, b in zip(again, plain, strict=True))


def test_reasons() -> None:
    reason = BLOCK_SPARSE.unsupported_reason
    assert reason(experts_shape(width=128), CPU) == "Triton kernels need a CUDA device"
    assert reason(experts_shape(width=96), CPU) == (
        "block_sparse needs expert_ffn_hidden_size to be a multiple of 128, not 96"
    )
