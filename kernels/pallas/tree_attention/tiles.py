"""Tile sizes of the GPU kernel: what a program computes at a time, and over how many programs a prefix is split."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kernels.pallas.tree_attention.problem import Problem
from kernels.topology import Chip


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """What one program of the kernel computes at a time.

    block_rows: query rows (nodes x grouped heads) of a program. block_keys: keys per step of its loop.
    num_warps, num_stages: threads of a program / 32, and key tiles in flight.

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    block_rows: int
    block_keys: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        allowed = {
            "block_rows": (16, 32, 64, 128),
            "block_keys": (32, 64, 128),  # whole words of mask bits
            "num_warps": (1, 2, 4, 8),
            "num_stages": (1, 2, 3, 4),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} must be one of {values}, got {getattr(self, name)}")


def choose_tiles(problem: Problem, chip: Chip, config: TileConfig | None = None) -> tuple[TileConfig, int]:
    """Tiles (`config`, or the shipped ones) and the programs that share a prefix, for `problem` on `chip`."""
    rows = problem.nodes * problem.group
    config = config or tile_config(rows, problem.head_dim, problem.dtype, chip)
    programs = -(-rows // config.block_rows) * problem.batch * problem.kv_heads
    return config, prefix_splits(programs, problem.capacity, config, chip)


def programs_at_once(config: TileConfig, chip: Chip) -> int:
    """How many programs the GPU runs side by side: their registers allow a core two of up to 4 warps, or one."""
    return chip.cores * (2 if config.num_warps <= 4 else 1)


def tile_config(rows: int, head_dim: int, dtype: jnp.dtype, chip: Chip) -> TileConfig:
    """The shipped tiles for `rows` query rows (nodes x group) per kv head; all compile without spilling registers."""
    if jnp.dtype(dtype) == jnp.float32:  # whole float32 products have no tensor cores: small tiles, all in registers
        config = TileConfig(16 if rows <= 16 else 32, 32, 8, 1)
    elif head_dim == 256:
        wide = TileConfig(64, 64, 8, 2) if chip.shared_per_block >= 200_000 else TileConfig(64, 32, 8, 3)
        config = TileConfig(16, 32, 4, 3) if rows <= 16 else wide
    elif rows <= 16:
        config = TileConfig(16, 64, 4, 3)
    elif rows <= 64:
        config = TileConfig(64, 64, 4, 2)
    else:
        config = TileConfig(128, 64, 8, 3)
    while config.num_stages > 1 and shared_bytes(config, head_dim, dtype) > chip.shared_per_block:
        config = dataclasses.replace(config, num_stages=config.num_stages - 1)
    return config


def shared_bytes(config: TileConfig, head_dim: int, dtype: jnp.dtype) -> int:
    """Shared memory that a program takes at most: the query tile, keys and values in flight, and room to reduce."""
    in_flight = 2 * config.num_stages * config.block_keys
    return (config.block_rows + in_flight) * head_dim * jnp.dtype(dtype).itemsize + 3072


def prefix_splits(programs: int, capacity: int, config: TileConfig, chip: Chip) -> int:
    """Programs that share one prefix, given `programs` without a split.

    GPUs run programs in waves. The time of a split is counted in key tiles: waves x (tiles of a share + start and end
    of a program), where the end of a share writes its rows, and the merge reads them, as float32. The fewest shares
    within a tenth of the best are taken, since each costs memory too.
    """
    slots = programs_at_once(config, chip)
    tiles = -(-capacity // config.block_keys)

    def cost(splits: int) -> float:
        ends = 2 + (config.block_rows / 32 if splits > 1 else 0)
        return -(-programs * splits // slots) * (-(-tiles // splits) + ends)

    candidates = range(1, min(64, max(tiles, 1)) + 1)
    best = min(map(cost, candidates))
    return next(splits for splits in candidates if cost(splits) <= 1.1 * best)
