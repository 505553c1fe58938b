"""Grouped GEMM kernels in Triton. Imported only where Triton is installed.

Both are written for rows sorted by expert with the experts' bounds in device memory, so that nothing waits for the
host. `rows_kernel` multiplies each expert's rows by its matrix (forward, and backward to the rows with the matrix
transposed); `weights_kernel` sums over each expert's rows (backward to the matrices). Tiles go to programs in the order
of a persistent kernel, `tile = program, program + programs, ...`, and within an expert in the grouped order of Triton's
matmul tutorial, so that tiles that run at a time share operands in the second-level cache.

If USE_TMA is set, operands are loaded through tensor descriptors (bulk copies by the hardware, which also stop at the
tensor's end), otherwise through pointers with masks. HALVES writes a tile in two parts, which halves the shared memory
for it. FLATTEN joins the loops over tiles and steps, so that the operands of the next tile are loaded while one is
written. The compiler can do this only if the end of a tile does not branch.

Row and expert offsets are 64 bits wide: an operand may have more than 2^31 elements.
"""

from __future__ import annotations

import triton.language as tl

from bexp.kernels.jit import jit


@jit
def grouped_order(tile: tl.tensor, tiles_m: tl.tensor, tiles_n: tl.tensor, GROUP_M: tl.constexpr) -> tl.tensor:
    """The row and column of a tile when columns of GROUP_M tiles are walked one after the other."""
    strip = tile // (GROUP_M * tiles_n)
    first_m = strip * GROUP_M
    height = tl.minimum(tiles_m - first_m, GROUP_M)
    inside = tile - strip * (GROUP_M * tiles_n)
    return first_m + inside % height, inside // height


@jit
def halves(x: tl.tensor) -> tl.tensor:
    """The left and the right half of the columns."""
    return x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()


@jit
def store_rows(
    out: tl.tensor,
    result: tl.tensor,
    row: tl.tensor,
    end: tl.tensor,
    col: tl.tensor,
    N: tl.tensor,
    stride_out: tl.tensor,
) -> None:
    """The rows before `end` and the columns before N, from (row, col) on."""
    rows = row + tl.arange(0, result.shape[0])
    cols = col + tl.arange(0, result.shape[1])
    at = out + rows[:, None].to(tl.int64) * stride_out + cols[None, :]
    tl.store(at, result, mask=(rows[:, None] < end) & (cols[None, :] < N))


@jit
def rows_kernel(  # noqa: PLR0915 - compiled as one of several
    x: tl.tensor,
    w: tl.tensor,
    out: tl.tensor,
    ends: tl.tensor,
    num_experts: tl.tensor,
    K: tl.tensor,
    N: tl.tensor,
    stride_x: tl.tensor,
    stride_we: tl.tensor,
    stride_w: tl.tensor,
    stride_out: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EXPERTS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    USE_TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
    HALVES: tl.constexpr,
    x_desc: tl.tensor = None,
    w_desc: tl.tensor = None,
    out_desc: tl.tensor = None,
) -> None:
    """out[rows of e] = x[rows of e] @ w[e], with w[e] as (K, N), or (N, K) where TRANSPOSED; EXPERTS >= num_experts."""
    experts = tl.arange(0, EXPERTS)
    last = tl.load(ends + experts, mask=experts < num_experts, other=0)
    first = tl.load(ends + experts - 1, mask=(experts > 0) & (experts < num_experts), other=0)
    tiles_m_E = tl.where(experts < num_experts, (last - first + BLOCK_M - 1) // BLOCK_M, 0)
    ends_m_E = tl.cumsum(tiles_m_E, 0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    num_tiles = tl.sum(tiles_m_E, 0) * tiles_n

    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=FLATTEN):
        before = ends_m_E * tiles_n <= tile
        expert = tl.sum(before.to(tl.int32), 0)
        first_tile = tl.max(tl.where(before, ends_m_E, 0), 0) * tiles_n
        end = tl.load(ends + expert)
        start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        tile_m, tile_n = grouped_order(tile - first_tile, tl.cdiv(end - start, BLOCK_M), tiles_n, GROUP_M)
        row = start + tile_m * BLOCK_M
        col = tile_n * BLOCK_N

        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if USE_TMA:
            for k in tl.range(0, K, BLOCK_K):
                a = x_desc.load([row, k])
                if TRANSPOSED:
                    b = w_desc.load([expert, col, k]).reshape(BLOCK_N, BLOCK_K).T
                else:
                    b = w_desc.load([expert, k, col]).reshape(BLOCK_K, BLOCK_N)
                acc = tl.dot(a, b, acc)
        else:
            rows = row + tl.arange(0, BLOCK_M)
            cols = col + tl.arange(0, BLOCK_N)
            ks = tl.arange(0, BLOCK_K)
            # A row past the group's end repeats the last one; it is not written.
            a_at = x + tl.minimum(rows, end - 1)[:, None].to(tl.int64) * stride_x + ks[None, :]
            b_at = w + expert.to(tl.int64) * stride_we
            if TRANSPOSED:
                b_at += cols[None, :].to(tl.int64) * stride_w + ks[:, None]
                step = BLOCK_K
            else:
                b_at += ks[:, None].to(tl.int64) * stride_w + cols[None, :]
                step = BLOCK_K * stride_w
            for k in tl.range(0, K, BLOCK_K):
                a = tl.load(a_at, mask=ks[None, :] < K - k, other=0.0)
                b = tl.load(b_at, mask=(ks[:, None] < K - k) & (cols[None, :] < N), other=0.0)
                acc = tl.dot(a, b, acc)
                a_at += BLOCK_K
                b_at += step

        result = acc.to(out.dtype.element_ty)
        if USE_TMA and not FLATTEN:
            if row + BLOCK_M <= end:
                if HALVES:
                    left, right = halves(result)
                    out_desc.store([row, col], left)
                    out_desc.store([row, col + BLOCK_N // 2], right)
                else:
                    out_desc.store([row, col], result)
            else:
                store_rows(out, result, row, end, col, N, stride_out)
        else:
            store_rows(out, result, row, end, col, N, stride_out)


@jit
def weights_kernel(
    x: tl.tensor,
    grad: tl.tensor,
    out: tl.tensor,
    ends: tl.tensor,
    num_experts: tl.tensor,
    K: tl.tensor,
    N: tl.tensor,
    stride_x: tl.tensor,
    stride_grad: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP_M: tl.constexpr,
    USE_TMA: tl.constexpr,
    HALVES: tl.constexpr,
    x_desc: tl.tensor = None,
    grad_desc: tl.tensor = None,
    out_desc: tl.tensor = None,
) -> None:
    """out[e] = x[rows of e].T @ grad[rows of e], (E, K, N) contiguous; zero for an expert without rows.

    Whole blocks of rows are read without masks; what remains of the group is read with them, since the rows that
    follow are another expert's.
    """
    tiles_m = tl.cdiv(K, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n

    for tile in tl.range(tl.program_id(0), num_experts * tiles, tl.num_programs(0)):
        expert = tile // tiles
        tile_m, tile_n = grouped_order(tile % tiles, tiles_m, tiles_n, GROUP_M)
        end = tl.load(ends + expert)
        start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        whole = (end - start) // BLOCK_R
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        rows = row + tl.arange(0, BLOCK_M)
        cols = col + tl.arange(0, BLOCK_N)
        rs = tl.arange(0, BLOCK_R)
        x_at = x + (start + rs)[:, None].to(tl.int64) * stride_x + rows[None, :]
        grad_at = grad + (start + rs)[:, None].to(tl.int64) * stride_grad + cols[None, :]

        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if USE_TMA:
            for i in tl.range(0, whole):
                a = x_desc.load([start + i * BLOCK_R, row])
                b = grad_desc.load([start + i * BLOCK_R, col])
                acc = tl.dot(a.T, b, acc)
            x_at += whole.to(tl.int64) * BLOCK_R * stride_x
            grad_at += whole.to(tl.int64) * BLOCK_R * stride_grad
        else:
            for _ in tl.range(0, whole):
                a = tl.load(x_at, mask=rows[None, :] < K, other=0.0)
                b = tl.load(grad_at, mask=cols[None, :] < N, other=0.0)
                acc = tl.dot(a.T, b, acc)
                x_at += BLOCK_R * stride_x
                grad_at += BLOCK_R * stride_grad
        rest = end - start - whole * BLOCK_R
        if rest > 0:
            a = tl.load(x_at, mask=(rs[:, None] < rest) & (rows[None, :] < K), other=0.0)
            b = tl.load(grad_at, mask=(rs[:, None] < rest) & (cols[None, :] < N), other=0.0)
            acc = tl.dot(a.T, b, acc)

        result = acc.to(out.dtype.element_ty)
        if USE_TMA:
            if HALVES:
                left, right = halves(result)
                out_desc.store([expert, row, col], left.reshape(1, BLOCK_M, BLOCK_N // 2))
                out_desc.store([expert, row, col + BLOCK_N // 2], right.reshape(1, BLOCK_M, BLOCK_N // 2))
            else:
                out_desc.store([expert, row, col], result.reshape(1, BLOCK_M, BLOCK_N))
        else:
            at = out + expert.to(tl.int64) * K * N + rows[:, None].to(tl.int64) * N + cols[None, :]
            tl.store(at, result, mask=(rows[:, None] < K) & (cols[None, :] < N))
