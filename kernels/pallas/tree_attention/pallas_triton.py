"""The portable GPU kernel: Pallas on its Triton lowering, for NVIDIA GPUs from Ampere on.

A program owns a tile of query rows (nodes x grouped heads, so that keys and values are read once for all of them) and
a share of the prefix, over which it keeps a running softmax in registers. Scores are never written to memory. With
several shares, one more program takes the block's own keys, and the partial results are merged by their log-sum-exp.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels.pallas.tree_attention.problem import Problem, describe
from kernels.pallas.tree_attention.tiles import TileConfig, choose_tiles
from kernels.topology import chip_in_use

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:  # deprecated since JAX 0.11: a later one may be without it
    plgpu = None  # type: ignore[assignment]

NAME = "pallas_triton"

# The running maximum of a row that has seen nothing. Finite, so that no difference of maxima is NaN; scores below it
# would weigh nothing.
_LOWEST = -1e30
_MAX_GRID = 65_535  # programs along the second and third axis of a CUDA grid


class Running(NamedTuple):
    """A softmax under way over `R` rows: maximum and sum `[R]`, weighted values `[R, D]`; base-2 exponents, float32."""

    maximum: jax.Array
    total: jax.Array
    values: jax.Array


def why_not(problem: Problem) -> list[str]:
    """The reasons for which this kernel declines a problem; none if it serves it."""
    reasons = []
    if plgpu is None:
        reasons.append(f"JAX {jax.__version__} has no Triton lowering")
    if problem.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        reasons.append(f"dtype {problem.dtype} is not bfloat16, float16 or float32")
    if problem.head_dim not in (32, 64, 128, 256):
        reasons.append(f"head_dim {problem.head_dim} is not 32, 64, 128 or 256")
    if problem.group > 16:
        reasons.append(f"{problem.group} query heads per kv head are more than 16")
    if problem.nodes > 512:
        reasons.append(f"{problem.nodes} nodes are more than 512")
    if problem.page_size is not None and not 16 <= problem.page_size <= 128:
        reasons.append(f"page size {problem.page_size} is not in 16 to 128")
    if problem.batch * problem.kv_heads > _MAX_GRID:
        reasons.append(f"batch x kv heads is {problem.batch * problem.kv_heads}, over a grid's {_MAX_GRID}")
    if jax.default_backend() not in ("cpu", "gpu"):
        reasons.append(f"this machine has a {jax.default_backend()}, not an NVIDIA GPU")
    elif chip_in_use().capability < (8, 0):
        reasons.append(f"{chip_in_use().name} is not an NVIDIA GPU from Ampere on (compute capability 8.0)")
    return reasons


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache_key: jax.Array,
    cache_value: jax.Array,
    lengths: jax.Array,
    mask: jax.Array,
    page_table: jax.Array | None = None,
    *,
    scale: float,
    config: TileConfig | None = None,
    splits: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `tree_attention`; arguments are already checked.

    Args:
        config, splits: tile sizes, and programs that share a prefix; chosen for the GPU in use by default.
        interpret: run as plain JAX operations, on any device.
    """
    problem = describe(query, key, value, cache_key, cache_value, lengths, mask, page_table)
    config, shipped = choose_tiles(problem, chip_in_use(), config)
    splits = splits or shipped
    arrays = (query, key, value, cache_key, cache_value, lengths, mask, page_table)
    return _attend(*arrays, scale=scale, config=config, splits=splits, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("scale", "config", "splits", "interpret"))
def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache_key: jax.Array,
    cache_value: jax.Array,
    lengths: jax.Array,
    mask: jax.Array,
    page_table: jax.Array | None,
    *,
    scale: float,
    config: TileConfig,
    splits: int,
    interpret: bool,
) -> jax.Array:
    """One kernel call, and the merge of its parts; jitted, so that a program's layers share one trace."""
    batch, nodes, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads
    parts = 1 if splits == 1 else splits + 1
    rows = (batch, nodes, kv_heads, group)
    row = lambda i: (i // kv_heads, 0, i % kv_heads)  # noqa: E731 - batch row, first node, kv head
    own = pl.BlockSpec((None, nodes, None, head_dim), lambda t, p, i: (*row(i), 0))
    cached = pl.BlockSpec((None, None, *cache_key.shape[2:]), lambda t, p, i: (i // kv_heads, i % kv_heads, 0, 0))
    table = None
    if page_table is not None:
        pool = (cache_key.shape[0], None, *cache_key.shape[2:])
        cached = pl.BlockSpec(pool, lambda t, p, i: (0, i % kv_heads, 0, 0))
        table = pl.BlockSpec((None, page_table.shape[1]), lambda t, p, i: (i // kv_heads, 0))
    shared_mask = mask.shape[0] == 1
    by_part = lambda t, p, i: (p, *row(i), 0)  # noqa: E731
    if parts == 1:
        out_specs = [pl.BlockSpec((None, nodes, None, group, head_dim), lambda t, p, i: (*row(i), 0, 0))]
        out_shape = [jax.ShapeDtypeStruct((*rows, head_dim), query.dtype)]
    else:
        scalars = pl.BlockSpec((None, None, nodes, None, group), by_part)
        values = pl.BlockSpec((None, None, nodes, None, group, head_dim), lambda t, p, i: (*by_part(t, p, i), 0))
        out_specs = [scalars, scalars, values]
        out_shape = [jax.ShapeDtypeStruct((parts, *rows), jnp.float32)] * 2
        out_shape += [jax.ShapeDtypeStruct((parts, *rows, head_dim), jnp.float32)]
    out = pl.pallas_call(
        functools.partial(_kernel, scale=scale, config=config, splits=splits),
        grid=(pl.cdiv(nodes * group, config.block_rows), parts, batch * kv_heads),
        in_specs=[
            pl.BlockSpec((None, nodes, None, group, head_dim), lambda t, p, i: (*row(i), 0, 0)),
            own,
            own,
            cached,
            cached,
            table,
            pl.BlockSpec((None,), lambda t, p, i: (i // kv_heads,)),
            pl.BlockSpec((None, nodes, mask.shape[2]), lambda t, p, i: (0 if shared_mask else i // kv_heads, 0, 0)),
        ],
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="tree_attention",
    )(
        query.reshape(*rows, head_dim), key, value, cache_key, cache_value, page_table, lengths, mask
    )  # fmt: skip
    merged = out[0] if parts == 1 else _merge(Running(*out)).astype(query.dtype)
    return merged.reshape(query.shape)


def _merge(parts: Running) -> jax.Array:
    """Attention from the partial softmaxes of disjoint keys, stacked on the first axis."""
    weights = jnp.exp2(parts.maximum - jnp.max(parts.maximum, axis=0, keepdims=True))
    total = jnp.sum(weights * parts.total, axis=0)
    values = jnp.sum(weights[..., None] * parts.values, axis=0)
    return values / jnp.where(total == 0, 1.0, total)[..., None]


def _kernel(
    query_ref: Any,  # [N, G, D]
    key_ref: Any,  # [N, D]
    value_ref: Any,  # [N, D]
    cache_key_ref: Any,  # [L, D], or the pool [P, S, D]
    cache_value_ref: Any,  # the same
    table_ref: Any,  # None, or page numbers [pages]
    length_ref: Any,  # []
    mask_ref: Any,  # [N, W]
    *out_refs: Any,  # [N, G, D]; or maximum [N, G], total [N, G], values [N, G, D]
    scale: float,
    config: TileConfig,
    splits: int,
) -> None:
    """One program: rows `tile`, part `part` of their keys, for one batch row and kv head.

    Index arrays address memory everywhere, for a masked element may lie outside: its pointer is never followed. They
    are int32, whatever jax_enable_x64 says.
    """
    nodes, group, head_dim = query_ref.shape
    tile, part = pl.program_id(0), pl.program_id(1)
    row = tile * config.block_rows + jnp.arange(config.block_rows, dtype=jnp.int32)
    node, member = row // group, row % group
    real = node < nodes
    features = jnp.arange(head_dim, dtype=jnp.int32)[None]
    query = _load(query_ref, (node[:, None], member[:, None], features), real[:, None])
    include = functools.partial(_include, query=query, scale=scale * math.log2(math.e))

    page_size = None if table_ref is None else cache_key_ref.shape[1]
    capacity = cache_key_ref.shape[0] if page_size is None else table_ref.shape[0] * page_size
    length = jnp.minimum(length_ref[()], capacity)
    tiles = pl.cdiv(length, jnp.int32(config.block_keys))
    share = pl.cdiv(tiles, jnp.int32(splits))

    def prefix_tile(index: jax.Array, state: Running) -> Running:
        keys = index * config.block_keys + jnp.arange(config.block_keys, dtype=jnp.int32)
        live = keys < length
        where: tuple[jax.Array, ...] = (keys[:, None], features)
        if page_size is not None:
            page = _load(table_ref, (keys // page_size,), live)
            where = (page[:, None], (keys % page_size)[:, None], features)
        # Dead rows load as zeros: what they hold, NaN included, reaches neither product.
        loaded = _load(cache_key_ref, where, live[:, None]), _load(cache_value_ref, where, live[:, None])
        return include(state, *loaded, live[None])

    def own_tile(index: jax.Array, state: Running) -> Running:
        keys = index * config.block_keys + jnp.arange(config.block_keys, dtype=jnp.int32)
        live = keys < nodes
        where = (keys[:, None], features)
        loaded = _load(key_ref, where, live[:, None]), _load(value_ref, where, live[:, None])
        return include(state, *loaded, _visible(mask_ref, node, index, config.block_keys) & live[None])

    state = Running(
        jnp.full(config.block_rows, _LOWEST, jnp.float32),
        jnp.zeros(config.block_rows, jnp.float32),
        jnp.zeros((config.block_rows, head_dim), jnp.float32),
    )
    # The part past the last share has no prefix tiles, since its range begins behind them.
    state = jax.lax.fori_loop(part * share, jnp.minimum((part + 1) * share, tiles), prefix_tile, state)
    has_own = jnp.int32(1) if splits == 1 else (part == splits).astype(jnp.int32)
    state = jax.lax.fori_loop(0, has_own * pl.cdiv(nodes, config.block_keys), own_tile, state)

    if splits == 1:
        total = jnp.where(state.total == 0, 1.0, state.total)
        state = Running(state.maximum, state.total, state.values / total[:, None])
    else:
        for ref, scalars in zip(out_refs, state[:2], strict=False):
            plgpu.store(ref.at[node, member], scalars, mask=real)
    out_ref = out_refs[-1]
    seen = jnp.broadcast_to(real[:, None], state.values.shape)
    where = (node[:, None], member[:, None], features)
    plgpu.store(out_ref.at[where], state.values.astype(out_ref.dtype), mask=seen)


def _load(ref: Any, where: tuple[jax.Array, ...], live: jax.Array) -> jax.Array:
    """`ref[where]`, and 0 where not `live` (broadcast to the result)."""
    shape = jnp.broadcast_shapes(*(index.shape for index in where))
    return plgpu.load(ref.at[where], mask=jnp.broadcast_to(live, shape), other=jnp.zeros((), ref.dtype))


def _visible(mask_ref: Any, node: jax.Array, index: jax.Array, block_keys: int) -> jax.Array:
    """Bool `[R, block_keys]`: which keys of own tile `index` each row's node sees, from packed bits."""
    column = jnp.arange(block_keys, dtype=jnp.uint32)[None]
    first, words = index * (block_keys // 32), mask_ref.shape[1]
    bits = jnp.zeros((node.shape[0], block_keys), jnp.uint32)
    for i in range(block_keys // 32):
        word = _load(mask_ref, (node, jnp.full_like(node, first + i)), (node < mask_ref.shape[0]) & (first + i < words))
        bits = jnp.where(column // 32 == i, word[:, None], bits)
    return (bits >> (column % 32)) & 1 != 0


def _include(
    state: Running, key: jax.Array, value: jax.Array, visible: jax.Array, *, query: jax.Array, scale: float
) -> Running:
    """The running softmax after keys and values `[C, D]`, where `visible` (broadcast to `[R, C]`)."""
    # "highest" keeps float32 products whole; it changes nothing for narrower inputs.
    dot = functools.partial(
        jax.lax.dot_general, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    scores = dot(query, key, (((1,), (1,)), ((), ()))) * scale
    scores = jnp.where(visible, scores, -jnp.inf)
    maximum = jnp.maximum(state.maximum, jnp.max(scores, axis=1))
    weights = jnp.exp2(scores - maximum[:, None])
    decay = jnp.exp2(state.maximum - maximum)
    values = dot(weights.astype(value.dtype), value, (((1,), (0,)), ((), ())))
    return Running(maximum, decay * state.total + jnp.sum(weights, axis=1), decay[:, None] * state.values + values)
