"""How often the tokens that a head learns are the ones its target would have chosen."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from jetspec_jax.target import TargetModel
from train.data import Packed
from train.packed import target_forward

LOW_ARGMAX_SHARE = 0.8
"""Greedy text of the target itself has a share of 1, up to rounding; text by others much less."""

_CHUNK = 256  # tokens whose logits over the vocabulary exist at a time


def argmax_share(target: TargetModel, batches: Iterable[Packed]) -> float:
    """The share of response tokens that are the target's argmax after the text before them; 0 when there are none.

    A document's first token follows nothing and does not count.
    """
    counts = [_count(target, batch) for batch in batches]
    right, total = (sum(int(count[i]) for count in counts) for i in (0, 1))
    return right / max(total, 1)


@jax.jit
def _count(target: TargetModel, batch: Packed) -> tuple[jax.Array, jax.Array]:
    """Response tokens of a batch that are the argmax, and all of them: int32 scalars."""
    hidden = target_forward(target, batch).hidden
    follows = (batch.documents[:, 1:] == batch.documents[:, :-1]) & (batch.documents[:, 1:] > 0)
    counted = batch.response[:, 1:] & follows

    flat = (hidden[:, :-1].reshape(-1, hidden.shape[-1]), batch.tokens[:, 1:].reshape(-1))
    # A batched map runs as a scan over chunks, so that the logits of all tokens never exist together.
    right = jax.lax.map(lambda x: jnp.argmax(target.logits(x[0])) == x[1], flat, batch_size=_CHUNK)
    right = right.reshape(counted.shape)
    return jnp.sum(right & counted, dtype=jnp.int32), jnp.sum(counted, dtype=jnp.int32)


def low_share_warning(share: float) -> str | None:
    """What to tell a user whose data has this share; None when all is well."""
    if share >= LOW_ARGMAX_SHARE:
        return None
    return (
        f"only {share:.0%} of the response tokens are the target's own choice (greedy text of the target has about "
        f"100%): a head learns much less from text by others; regenerate the data with `python -m train.regenerate`"
    )
