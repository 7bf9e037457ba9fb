"""`python -m kernels.pallas.check`: are the kernels right on this machine's GPU, and how fast are they?

Every backend of `tree_attention` is compared with float64 NumPy; on a GPU, at the sizes of Qwen3-8B, and timed against
XLA, `jax.nn.dot_product_attention` and the roofline. Without a GPU the kernel is interpreted at small sizes, and what
could not be done is said. The exit code is 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import functools
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.pallas.tree_attention import Problem, parents_mask, tree_attention, unpack_mask
from kernels.pallas.tree_attention.reference import reference
from kernels.pallas.tree_attention.work import ideal_work
from kernels.topology import CHIPS, chip_in_use

_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}
_BACKENDS = ("pallas", "xla")
_PAGE = 64
Arguments = dict[str, jax.Array]


def small_problems() -> list[Problem]:
    """What is quick to interpret: one node and a tree, contiguous and paged, in every dtype."""
    kinds = [("float32", None), ("bfloat16", 16), ("float16", None)]
    return [
        Problem(2, nodes, 6, 2, 32, 160, page_size, jnp.dtype(dtype)) for nodes in (1, 37) for dtype, page_size in kinds
    ]


def real_problems(contexts: tuple[int, ...]) -> list[Problem]:
    """Qwen3-8B's attention: plain decoding, small and large trees, batches, pages; and float32, which must be exact."""
    bfloat16, float32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
    sizes = [(1, 1), (1, 64), (1, 256), (8, 1), (8, 64)]
    problems = [
        Problem(batch, nodes, 32, 8, 128, context, None, bfloat16) for context in contexts for batch, nodes in sizes
    ]
    problems += [Problem(1, 256, 32, 8, 128, contexts[0], _PAGE, bfloat16)]
    return [*problems, Problem(1, 64, 32, 8, 128, contexts[0], None, float32)]


def random_arguments(problem: Problem, *, ragged: bool, seed: int = 0) -> Arguments:
    """Arguments of `tree_attention`: random trees; with `ragged`, lengths from 0 up and NaN in all rows past them."""
    batch, nodes, heads, kv_heads, head_dim, capacity, page_size, dtype = problem
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32), dtype)  # noqa: E731
    lengths = np.full(batch, capacity, np.int32)
    if ragged:
        lengths[0] = capacity - capacity // 3
        lengths[1:] = rng.integers(0, capacity + 1, batch - 1)
    parents = np.array([[rng.integers(0, max(node, 1)) for node in range(nodes)] for _ in range(batch)], np.int32)
    args = {
        "query": normal(batch, nodes, heads, head_dim),
        "key": normal(batch, nodes, kv_heads, head_dim),
        "value": normal(batch, nodes, kv_heads, head_dim),
        "lengths": jnp.asarray(lengths),
        "mask": parents_mask(jnp.asarray(parents), nodes),
    }
    past = np.arange(capacity)[None, None, :, None] >= lengths[:, None, None, None]
    names = ("cache_key", "cache_value")
    caches = {
        name: jnp.where(past, jnp.asarray(np.nan, dtype), normal(batch, kv_heads, capacity, head_dim)) for name in names
    }
    if page_size is None:
        return args | caches
    table = rng.permutation(batch * capacity // page_size).astype(np.int32)
    place = jnp.asarray(np.argsort(table))
    paged = lambda x: x.reshape(batch, kv_heads, -1, page_size, head_dim).swapaxes(1, 2)  # noqa: E731
    pools = {name: paged(x).reshape(-1, kv_heads, page_size, head_dim)[place] for name, x in caches.items()}
    return args | pools | {"page_table": jnp.asarray(table.reshape(batch, -1))}


def error(problem: Problem, backend: str, args: Arguments, expected: np.ndarray) -> float:
    """The largest error of a backend as a multiple of what its dtype is allowed; at most 1 is right."""
    attend = jax.jit(functools.partial(tree_attention, backend=backend))  # type: ignore[arg-type]
    got = np.asarray(attend(**args), np.float64)
    allowed = _TOLERANCE[str(problem.dtype)] * (1 + np.abs(expected))
    wrong = np.where(np.isfinite(got), np.abs(got - expected), np.inf)
    return float(np.max(wrong / allowed))


def rivals(args: Arguments) -> dict[str, tuple[Callable[..., jax.Array], Arguments]]:
    """What else computes the same: name -> (function of query and the rest, the rest).

    They are given one contiguous array of keys and a dense mask, neither of which they have to make.
    """
    ours = {name: x for name, x in args.items() if name != "query"}
    table: dict[str, Any] = {
        name: (functools.partial(tree_attention, backend=name), ours)  # type: ignore[arg-type]
        for name in _BACKENDS
    }
    if "page_table" in args:
        return table
    nodes, capacity = args["query"].shape[1], args["cache_key"].shape[2]
    prefix = jnp.arange(capacity)[None, None] < args["lengths"][:, None, None]
    seen = (jnp.broadcast_to(prefix, (len(args["lengths"]), nodes, capacity)), unpack_mask(args["mask"], nodes))
    dense = {
        "key": jnp.concatenate([args["cache_key"].swapaxes(1, 2), args["key"]], axis=1),
        "value": jnp.concatenate([args["cache_value"].swapaxes(1, 2), args["value"]], axis=1),
        "mask": jnp.concatenate(seen, axis=-1)[:, None],
    }
    for implementation in ("cudnn", "xla"):
        attend = functools.partial(jax.nn.dot_product_attention, implementation=implementation)
        table[f"jax.nn {implementation}"] = (attend, dense)
    return table


def seconds(attend: Callable[..., jax.Array], query: jax.Array, rest: Arguments, steps: int = 20) -> float:
    """Time of one call: the best of 5 chains of `steps` calls, each the next one's query, without the host between."""

    @jax.jit
    def chain(query: jax.Array, rest: Arguments) -> jax.Array:
        return jax.lax.fori_loop(0, steps, lambda _, query: attend(query, **rest).astype(query.dtype), query)

    jax.block_until_ready(chain(query, rest))
    times = []
    for _ in range(5):
        started = time.perf_counter()
        jax.block_until_ready(chain(query, rest))
        times.append(time.perf_counter() - started)
    return min(times) / steps


def compare(problems: list[Problem]) -> bool:
    """Prints each backend's error at each problem; whether all are right."""
    right = True
    for problem in problems:
        args = random_arguments(problem, ragged=True)
        arrays: dict[str, Any] = {name: np.asarray(x) for name, x in args.items()}
        expected = reference(**arrays)
        errors = {backend: error(problem, backend, args, expected) for backend in _BACKENDS}
        right &= all(value <= 1 for value in errors.values())
        told = ", ".join(f"{name} {value:.3f}{'' if value <= 1 else ' WRONG'}" for name, value in errors.items())
        print(f"{_name(problem)}: error / allowed: {told}", flush=True)
    return right


def time_all(problems: list[Problem], steps: int = 20) -> None:
    """Prints, as a Markdown table, what each implementation takes, and its share of the roofline of a known chip."""
    chip = chip_in_use()
    known = chip in CHIPS.values()
    roofline = f"{chip.bandwidth / 1e12:.2f} TB/s and {chip.tensor / 1e12:.0f} bfloat16 TFLOP/s"
    print(f"\n{chip.name}; microseconds ({f'share of the roofline of {roofline}' if known else 'roofline unknown'})\n\n"
          "| problem | pallas | xla | jax.nn cudnn | jax.nn xla |\n|---|---|---|---|---|")  # fmt: skip
    for problem in problems:
        args = random_arguments(problem, ragged=False)
        bound = ideal_work(problem).seconds(chip, problem.dtype)
        cells = {}
        for name, (attend, rest) in rivals(args).items():
            try:
                taken = seconds(attend, args["query"], rest, steps)
                cells[name] = f"{taken * 1e6:.1f}" + (f" ({bound / taken:.0%})" if known else "")
            except (ValueError, RuntimeError) as reason:  # an implementation that cannot serve, or runs out of memory
                cells[name] = "no: " + str(reason).splitlines()[0][:40].replace("|", "/")
        columns = ("pallas", "xla", "jax.nn cudnn", "jax.nn xla")
        print(f"| {_name(problem)} | " + " | ".join(cells.get(name, "") for name in columns) + " |", flush=True)


def _name(problem: Problem) -> str:
    pages = f", pages of {problem.page_size}" if problem.page_size else ""
    return f"{problem.dtype} batch {problem.batch}, context {problem.capacity}, {problem.nodes} nodes{pages}"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m kernels.pallas.check", description=__doc__)
    parser.add_argument("--context", type=int, nargs="+", default=[4096, 32_768], help="cached tokens on a GPU, rising")
    args = parser.parse_args()
    if any(context < 1 or context % _PAGE for context in args.context):
        parser.error(f"--context must be multiples of {_PAGE}, the page size of one problem; got {args.context}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    on_gpu = jax.default_backend() == "gpu"
    device = jax.devices()[0]
    print(f"{device.platform} {device.device_kind}, JAX {jax.__version__}")
    problems = real_problems(tuple(args.context)) if on_gpu else small_problems()
    # The reference is slow: it sees the shortest context, which the kernel splits and fills like any other.
    right = compare([problem for problem in problems if not on_gpu or problem.capacity == min(args.context)])
    if on_gpu:
        time_all(problems)
    else:
        print("no GPU: the kernel was interpreted, at small sizes. Not done: running it compiled, timing it. "
              "What it compiles to: python -m kernels.pallas.inspect")  # fmt: skip
    print("all right" if right else "WRONG results: see above")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
