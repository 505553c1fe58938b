"""Grouped GEMM for Hopper in Gluon: a producer warp and warpgroups that multiply, persistent over the tiles.

`gemm` launches `rows_kernel` and `weights_kernel`. Both share the operand stages and the main loop (`pipeline`), find
their tiles (`schedule`), and may claim tiles when a program becomes free (`tile_scheduler`). Only these five import
Triton. `tiles` divides the work, `launch` describes tensors, and `counter` counts the tiles that were claimed.
"""

from bexp.kernels.experts.hopper_grouped.hopper_experts import HOPPER_GROUPED as HOPPER_GROUPED
