"""An expert FFN in few kernels: the steps between the grouped GEMMs run inside the GEMMs.

A GEMM gathers the tokens as it loads its rows, and scatters the token-expert pairs as it stores them, like ScatterMoE
(Tan et al., 2024, arXiv:2403.08245). Activation, routing weight and their gradients are epilogues, and only the
pre-activation of each row is kept for backward, like in SonicMoE (Guo et al., 2025, arXiv:2512.14080).
"""

from bexp.kernels.experts.fused.fused_experts import FUSED as FUSED
