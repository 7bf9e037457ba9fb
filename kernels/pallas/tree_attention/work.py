"""Bytes and operations of one attention, and the time below which a GPU cannot do it."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from kernels.pallas.tree_attention.problem import Problem
from kernels.pallas.tree_attention.tiles import TileConfig
from kernels.topology import Chip


class Work(NamedTuple):
    """What one attention must move and multiply: bytes to and from memory, floating-point operations."""

    bytes: int
    operations: int

    def seconds(self, chip: Chip, dtype: jnp.dtype) -> float:
        """The roofline bound: the longer of moving the bytes and doing the operations at data-sheet speed."""
        return max(self.bytes / chip.bandwidth, self.operations / peak(chip, dtype))


def peak(chip: Chip, dtype: jnp.dtype) -> float:
    """FLOP/s of products in this dtype; whole float32 products have no tensor cores."""
    return chip.float32 if jnp.dtype(dtype) == jnp.float32 else chip.tensor


def ideal_work(problem: Problem) -> Work:
    """The least that any implementation needs when every row's prefix is `capacity` long.

    Keys and values are read once, queries once, and outputs written once; two products of 2 operations each.
    """
    keys = problem.capacity + problem.nodes
    rows = problem.nodes * problem.heads
    moved = 2 * keys * problem.kv_heads + 2 * rows
    mask = 4 * problem.nodes * -(-problem.nodes // 32)
    return Work(
        problem.batch * (moved * problem.head_dim * problem.dtype.itemsize + mask),
        problem.batch * 4 * rows * keys * problem.head_dim,
    )


def kernel_work(problem: Problem, config: TileConfig, splits: int) -> Work:
    """What the kernel adds to it: rows and keys that fill up tiles, and partial results written and read as float32."""
    ideal = ideal_work(problem)
    rows, block = problem.nodes * problem.group, config.block_rows
    keys = sum(-(-n // config.block_keys) * config.block_keys for n in (problem.capacity, problem.nodes))
    padded_rows = -(-rows // block) * block * problem.kv_heads
    partial = 0 if splits == 1 else 2 * 4 * (splits + 1) * rows * problem.kv_heads * (problem.head_dim + 2)
    return Work(ideal.bytes + problem.batch * partial, problem.batch * 4 * padded_rows * keys * problem.head_dim)
