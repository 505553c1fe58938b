"""An expert FFN on the grouped GEMMs of `quack-kernels`, after SonicMoE (Guo et al., 2025, arXiv:2512.14080).

The GEMMs gather the tokens as they load their rows. The activation, its gradient and the routing weight are epilogues.
Backward computes the activation again from the pre-activation, which is all that is kept for each row.
"""
