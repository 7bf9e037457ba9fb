"""The public function: checks the contract, then calls the backend that serves it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Literal

import jax

from kernels.pallas.tree_attention import pallas_triton, xla
from kernels.pallas.tree_attention.problem import Problem, describe

Backend = Literal["auto", "pallas", "xla"]
BACKENDS: tuple[Backend, ...] = ("auto", "pallas", "xla")

# In order of preference. A backend has NAME, attend(...) and why_not(problem); XLA serves what all of these decline.
PALLAS_BACKENDS: tuple[ModuleType, ...] = (pallas_triton,)

_log = logging.getLogger(__name__)


def tree_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache_key: jax.Array,
    cache_value: jax.Array,
    lengths: jax.Array,
    mask: jax.Array,
    *,
    scale: float | None = None,
    page_table: jax.Array | None = None,
    backend: Backend = "auto",
) -> jax.Array:
    """Grouped-query attention of a block's nodes to their prefix and, under a mask, to the block itself.

    Axis letters: B batch, N nodes, H query heads, K kv heads (H a multiple of K), D head_dim, L capacity, P pages of
    the pool, S rows of a page.

    Args:
        query: `[B, N, H, D]`.
        key, value: `[B, N, K, D]`, the block's own; finite, since 0 times an infinite value is NaN for every node of
            the row. A guard would cost up to 2% of a verify forward, for numbers that spoil plain decoding as well.
        cache_key, cache_value: `[B, K, L, D]`, or `[P, K, S, D]` with a page table; rows at or past `lengths` and
            pages that no row uses are never read into a result, whatever they hold (NaN included).
        lengths: `int32[B]`, prefix rows that every node of the batch row sees.
        mask: `uint32[B or 1, N, ceil(N / 32)]`, packed as in `masks.py`: which nodes each node sees.
        scale: of the scores; 1 / sqrt(D) by default.
        page_table: `int32[B, pages]`; prefix row i of batch row b is row i % S of page `page_table[b, i // S]`.
            Entries past a row's length may be anything.
        backend: `auto` takes the first that serves the call: on CUDA a Pallas kernel, otherwise XLA, and says once
            in the log which. `pallas` and `xla` force one; `pallas` runs interpreted on a CPU.

    Returns:
        `[B, N, H, D]` in the query's dtype; softmax and accumulation are float32. A node that sees nothing gives 0.
        Gradients are XLA's, whatever the backend.

    Raises:
        ValueError: shapes or dtypes do not fit each other, or a forced backend cannot serve the call; the message
            lists every reason.
    """
    problem = describe(query, key, value, cache_key, cache_value, lengths, mask, page_table)
    scale = problem.head_dim**-0.5 if scale is None else scale
    attend = _choose(problem, backend, scale)
    return attend(query, key, value, cache_key, cache_value, lengths, mask, page_table)


def check_backend(problem: Problem, backend: Backend) -> ModuleType | None:
    """The module of the kernel that serves `problem` under this choice, None for XLA.

    Raises:
        ValueError: the choice is unknown, or is a kernel and none serves the problem; the message lists every reason.
    """
    if backend not in BACKENDS:
        raise ValueError(f"tree_attention: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "xla":
        _announce("xla, as asked")
        return None
    declined = {module.NAME: module.why_not(problem) for module in PALLAS_BACKENDS}
    serving = next((module for module in PALLAS_BACKENDS if not declined[module.NAME]), None)
    if serving is not None:
        return serving
    reasons = "; ".join(f"{name}: {', '.join(why)}" for name, why in declined.items())
    if backend == "pallas":
        raise ValueError(f"tree_attention: no Pallas kernel serves this call ({reasons}); use auto or xla")
    _announce(f"xla, since kernels decline ({reasons})")
    return None


def _choose(problem: Problem, backend: Backend, scale: float) -> Callable[..., jax.Array]:
    """The function of arrays that serves `problem`."""
    plain = functools.partial(xla.attend, scale=scale)
    serving = check_backend(problem, backend)
    if serving is None:
        return plain
    kernel = functools.partial(serving.attend, scale=scale)
    if backend == "pallas":
        _announce(f"{serving.NAME} on CUDA, interpreted on CPU (slow: for tests)")
        interpreted = functools.partial(kernel, interpret=True)
        return _differentiable(functools.partial(jax.lax.platform_dependent, cuda=kernel, cpu=interpreted), plain)
    _announce(f"{serving.NAME} on CUDA, xla elsewhere")
    return _differentiable(functools.partial(jax.lax.platform_dependent, cuda=kernel, default=plain), plain)


def _differentiable(attend: Callable[..., jax.Array], plain: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`attend` with the gradients of `plain`: a kernel has none of its own."""
    function = jax.custom_vjp(attend)
    function.defvjp(lambda *args: (attend(*args), args), lambda args, cotangent: jax.vjp(plain, *args)[1](cotangent))
    return function


@functools.cache
def _announce(choice: str) -> None:
    """Says each choice once a process: programs have an attention per layer."""
    _log.info("tree attention: %s", choice)
