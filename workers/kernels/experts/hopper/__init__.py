"""Grouped GEMM for Hopper in Gluon: a producer warp and warpgroups that multiply, persistent over the tiles.

`gemm` launches `rows_kernel` and `weights_kernel`, which share the ring of operand stages (`ring`) and find their tiles
(`schedule`); only these four import Triton. `tiles` says how the work is cut.
"""
