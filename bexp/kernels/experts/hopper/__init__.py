"""Grouped GEMM for Hopper in Gluon: a producer warp and warpgroups that multiply, persistent over the tiles.

`gemm` launches `rows_kernel` and `weights_kernel`, which share the ring of operand stages (`ring`), find their tiles
(`schedule`) and may draw them as they become free (`tickets`); only these five import Triton. `tiles` says how the work
is cut, `counter` holds what tickets are drawn from.
"""
