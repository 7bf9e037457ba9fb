"""Arguments of `tree_attention` for tests: random trees, ragged lengths, shuffled pages, poison where none may look."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kernels.pallas.tree_attention import pack_mask

POISONS = (np.nan, np.inf, -np.inf, 6e4)


def tree_mask(rng, batch, nodes):
    """Ancestor masks `[batch, nodes, nodes]` of random trees."""
    mask = np.zeros((batch, nodes, nodes), bool)
    for b in range(batch):
        for n in range(nodes):
            if n:
                mask[b, n] = mask[b, rng.integers(0, n)]
            mask[b, n, n] = True
    return mask


def arguments(seed, lengths, nodes, *, kv_heads=2, group=2, head_dim=32, capacity=64, dtype="float32", poison=np.nan,
              page_size=None, mask=None):  # fmt: skip
    """Random arguments by name. Cache rows past each length and unused pages hold `poison`.

    With `page_size`, the pages of all rows lie in random order in a pool with a few more, and entries of the table
    past a row's length are garbage. `mask` is boolean; a random tree's by default.
    """
    rng = np.random.default_rng(seed)
    batch, dtype = len(lengths), np.dtype(getattr(ml_dtypes, dtype, dtype))
    normal = lambda *shape: rng.normal(size=shape).astype(dtype)  # noqa: E731
    args = {
        "query": normal(batch, nodes, kv_heads * group, head_dim),
        "key": normal(batch, nodes, kv_heads, head_dim),
        "value": normal(batch, nodes, kv_heads, head_dim),
        "lengths": np.array(lengths, np.int32),
        "mask": np.array(pack_mask(jnp.asarray(tree_mask(rng, batch, nodes) if mask is None else mask))),
    }
    rows = capacity if page_size is None else -(-capacity // page_size) * page_size
    caches = {}
    for name in ("cache_key", "cache_value"):
        caches[name] = normal(batch, kv_heads, rows, head_dim)
        for b, length in enumerate(lengths):
            caches[name][b, :, length:] = np.asarray(poison).astype(dtype)
    if page_size is None:
        return args | caches
    pages, spare = rows // page_size, 3
    order = rng.permutation(batch * pages + spare)
    table = order[: batch * pages].reshape(batch, pages).astype(np.int32)
    for name, cache in caches.items():
        pool = np.full((len(order), kv_heads, page_size, head_dim), poison, dtype)
        pool[table] = cache.reshape(batch, kv_heads, pages, page_size, head_dim).swapaxes(1, 2)
        args[name] = pool
    for b, length in enumerate(lengths):
        unused = table[b, -(-length // page_size) :]
        unused[:] = rng.choice([-1, len(order) + 7, 2**30], len(unused))
    return args | {"page_table": table}
