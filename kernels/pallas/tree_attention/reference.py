"""What every backend is held to: softmax attention in float64 NumPy, written from the contract, sharing no code."""

from __future__ import annotations

import numpy as np


def reference(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    cache_key: np.ndarray,
    cache_value: np.ndarray,
    lengths: np.ndarray,
    mask: np.ndarray,
    *,
    scale: float | None = None,
    page_table: np.ndarray | None = None,
) -> np.ndarray:
    """`tree_attention` in float64: one row of the batch and one head at a time, over gathered prefix rows.

    Takes the same arguments, as NumPy arrays of any float dtype.
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    batch, nodes, heads, head_dim = query.shape
    scale = 1 / np.sqrt(head_dim) if scale is None else scale
    bits = np.unpackbits(np.ascontiguousarray(mask, "<u4").view(np.uint8), axis=-1, bitorder="little")
    sees = np.broadcast_to(bits[..., :nodes].astype(bool), (batch, nodes, nodes))
    out = np.zeros(query.shape)
    for b in range(batch):
        length = int(lengths[b])
        if page_table is None:
            prefix = [np.asarray(cache[b, :, :length]).swapaxes(0, 1) for cache in (cache_key, cache_value)]
        else:
            pages = page_table[b, : -(-length // cache_key.shape[2])]
            taken = [np.asarray(cache[pages]).swapaxes(1, 2) for cache in (cache_key, cache_value)]
            prefix = [rows.reshape(-1, *rows.shape[2:])[:length] for rows in taken]
        keys = np.concatenate([prefix[0].astype(np.float64), key[b]])
        values = np.concatenate([prefix[1].astype(np.float64), value[b]])
        visible = np.concatenate([np.ones((nodes, length), bool), sees[b]], axis=1)
        for h in range(heads):
            kv_head = h * key.shape[2] // heads
            scores = np.where(visible, query[b, :, h] @ keys[:, kv_head].T * scale, -np.inf)
            highest = scores.max(axis=1, keepdims=True)
            weights = np.where(visible, np.exp(scores - np.where(np.isinf(highest), 0, highest)), 0)
            total = weights.sum(axis=1, keepdims=True)
            out[b, :, h] = weights @ values[:, kv_head] / np.where(total == 0, 1, total)
    return out
