"""Experts as block-sparse matrix products, as MegaBlocks has them (Gale et al., 2023, MLSys)."""

from bexp.kernels.experts.block_sparse.block_experts import BLOCK_SPARSE as BLOCK_SPARSE
