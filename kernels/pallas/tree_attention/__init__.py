"""Attention of a block of tree nodes to a cached prefix and to each other."""

from kernels.pallas.tree_attention.api import BACKENDS, Backend, tree_attention
from kernels.pallas.tree_attention.masks import causal_mask, full_mask, pack_mask, parents_mask, unpack_mask

__all__ = [
    "BACKENDS",
    "Backend",
    "causal_mask",
    "full_mask",
    "pack_mask",
    "parents_mask",
    "tree_attention",
    "unpack_mask",
]
