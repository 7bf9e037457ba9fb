"""Attention of a block of tree nodes to a cached prefix and to each other."""

from kernels.pallas.tree_attention.api import BACKENDS, Backend, check_backend, tree_attention
from kernels.pallas.tree_attention.masks import causal_mask, full_mask, pack_mask, parents_mask, unpack_mask
from kernels.pallas.tree_attention.problem import Problem

__all__ = [
    "BACKENDS",
    "Backend",
    "Problem",
    "causal_mask",
    "check_backend",
    "full_mask",
    "pack_mask",
    "parents_mask",
    "tree_attention",
    "unpack_mask",
]
