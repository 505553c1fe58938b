"""An expert FFN in few kernels: what lies between the grouped GEMMs happens inside them.

Tokens are gathered where a GEMM loads its rows and pairs are scattered where it stores them, as ScatterMoE does (Tan et
al., 2024, arXiv:2403.08245); activation, routing weight and their gradients are epilogues, and backward keeps nothing
of a row but its pre-activation, as in SonicMoE (Guo et al., 2025, arXiv:2512.14080).
"""
