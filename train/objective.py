"""The distillation objective: blocks sampled from documents, one pass of the head over all, weighted KL.

Axis letters: B rows, L row length, A anchors (blocks) a row, S slots a block (block_size), E features, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax.head import DraftHead
from jetspec_jax.layers import Attend, KeyValue, rope_at
from jetspec_jax.target import TargetModel
from train.data import Packed
from train.packed import masked_attention


class Blocks(NamedTuple):
    """Blocks to draft, as the host samples them.

    anchors: int32 `[B, A]`, index in the row of each block's anchor.
    filled: int32 `[B, A]`, how many slots after the anchor hold true tokens instead of MASK (0: none; the block is
        then as in decoding).
    live: bool `[B, A]`, false for a block without a usable anchor.
    """

    anchors: np.ndarray | jax.Array
    filled: np.ndarray | jax.Array
    live: np.ndarray | jax.Array


class Supervision(NamedTuple):
    """What each slot is held against.

    source: int32 `[B, A, S]`, index in the row whose next-token distribution teaches the slot.
    weights: float32 `[B, A, S]`.
    """

    source: jax.Array
    weights: jax.Array


class BlockMetrics(NamedTuple):
    """loss: the objective. agreement: share of supervised MASK slots whose argmax is the target's. accepted: mean
    number of tokens a chain round would commit (leading slots that agree with the text, and the bonus token), over
    blocks without true tokens."""

    loss: jax.Array
    agreement: jax.Array
    accepted: jax.Array


def sample_blocks(batch: Packed, anchors: int, block_size: int, mixed_fill: float, rng: np.random.Generator) -> Blocks:
    """Random anchors among response tokens that have a successor; a share `mixed_fill` of the blocks is filled.

    A row with fewer usable tokens than `anchors` repeats none: its surplus blocks are not live.
    """
    rows, length = batch.tokens.shape
    anchors = min(anchors, length)
    successor = np.zeros((rows, length), bool)
    successor[:, :-1] = (batch.documents[:, 1:] == batch.documents[:, :-1]) & (batch.documents[:, :-1] > 0)
    usable = batch.response & successor
    order = np.argsort(rng.random((rows, length)) + ~usable, axis=1)[:, :anchors]
    live = np.take_along_axis(usable, order, axis=1)
    filled = rng.integers(1, block_size - 1, (rows, anchors), endpoint=False) if block_size > 2 else 0
    filled = np.where(rng.random((rows, anchors)) < mixed_fill, filled, 0)
    return Blocks(order.astype(np.int32), filled.astype(np.int32), live)


def block_inputs(batch: Packed, blocks: Blocks, block_size: int, mask_token_id: int) -> jax.Array:
    """Input tokens `[B, A, S]`: the anchor, the filled slots' true tokens, then MASK."""
    slots = jnp.arange(block_size)[None, None]
    index = jnp.clip(blocks.anchors[..., None] + slots, 0, batch.tokens.shape[1] - 1)
    rows = jnp.arange(index.shape[0])[:, None, None]
    return jnp.where(slots <= blocks.filled[..., None], batch.tokens[rows, index], mask_token_id)


def supervision(batch: Packed, blocks: Blocks, block_size: int, gamma: float) -> Supervision:
    """Sources and weights of every slot (method section 3).

    A MASK slot i learns the distribution of token anchor + i, which the target gives at anchor + i - 1. A filled
    slot already knows its own token and learns the one after it; the anchor counts as filled in filled blocks and
    learns nothing in others. A slot whose predicted token lies past its document learns nothing. Weights decay
    with the distance from the anchor to the predicted token: exp(-(distance - 1) / gamma).
    """
    length = batch.tokens.shape[1]
    slots = jnp.arange(block_size)[None, None]
    filled = blocks.filled[..., None]
    known = slots <= filled
    ahead = jnp.where(known, slots, slots - 1)  # the predicted token is the one after anchor + ahead
    source = blocks.anchors[..., None] + ahead
    rows = jnp.arange(source.shape[0])[:, None, None]
    document = jnp.take_along_axis(batch.documents, blocks.anchors, axis=1)[..., None]
    predicted = jnp.clip(source + 1, 0, length - 1)
    inside = (source + 1 < length) & (batch.documents[rows, predicted] == document)
    counted = inside & blocks.live[..., None] & ((slots > 0) | (filled > 0))
    decay = jnp.exp(-ahead.astype(jnp.float32) / gamma) if gamma else jnp.ones(ahead.shape)
    return Supervision(jnp.clip(source, 0, length - 1), jnp.where(counted, decay, 0.0))


def draft_blocks(head: DraftHead, target: TargetModel, batch: Packed, taps: jax.Array, blocks: Blocks) -> jax.Array:
    """The head's final hidden states `[B, A, S, E]` of all blocks, in one pass.

    A slot sees fused features of its own document strictly before its anchor, and slots of its own block: those
    up to itself (causal head) or all. This is the decode-time computation, so that logits are the same.

    Args:
        taps: `[B, L, T * E]`, the target's tapped outputs on `batch`.
    """
    config = head.config
    rows, length = batch.tokens.shape
    count, size = blocks.anchors.shape[1], config.block_size
    tokens = block_inputs(batch, blocks, size, config.mask_token_id)
    at_anchor = lambda x: jnp.take_along_axis(x, blocks.anchors, axis=1)  # noqa: E731
    positions = at_anchor(batch.positions)[..., None] + jnp.arange(size)[None, None]
    before = jnp.arange(length)[None, None] < blocks.anchors[..., None]
    context = before & (batch.documents[:, None] == at_anchor(batch.documents)[..., None])
    own = np.tri(size, dtype=bool) if config.causal_head else np.ones((size, size), bool)
    within = np.kron(np.eye(count, dtype=bool), own)
    mask = jnp.concatenate(
        [jnp.repeat(context, size, axis=1), jnp.broadcast_to(within[None], (rows, *within.shape))], axis=2
    )
    prefix = head.context_rows(taps, rope_at(batch.positions, config))
    attends = [_attend_to(layer, mask) for layer in prefix]
    flat = lambda x: x.reshape(rows, count * size, *x.shape[3:])  # noqa: E731
    hidden = head.run(flat(target.embed(tokens)), rope_at(flat(positions), config), attends)
    return hidden.reshape(rows, count, size, -1)


def _attend_to(context: KeyValue, mask: jax.Array) -> Attend:
    """Attention of blocks to one layer's context and to each other, under `mask` `[B, A * S, L + A * S]`."""

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        keys = jnp.concatenate([context.key, key], axis=1)
        return masked_attention(query, keys, jnp.concatenate([context.value, value], axis=1), mask)

    return attend


def distillation_loss(
    head: DraftHead,
    target: TargetModel,
    batch: Packed,
    taps: jax.Array,
    hidden: jax.Array,
    blocks: Blocks,
    *,
    gamma: float,
    temperature: float,
) -> tuple[jax.Array, BlockMetrics]:
    """Forward KL `T^2 sum(w KL(p_T || q_T)) / sum(w)`, in float32, and metrics (paper section 3).

    Args:
        taps, hidden: the target's outputs `[B, L, ...]` on `batch`; no gradient flows into them.
    """
    taught = supervision(batch, blocks, head.config.block_size, gamma)
    rows = jnp.arange(batch.tokens.shape[0])[:, None, None]
    teacher = jax.lax.stop_gradient(target.logits(hidden[rows, taught.source]))
    student = target.logits(draft_blocks(head, target, batch, taps, blocks))
    log_p = jax.nn.log_softmax(teacher / temperature)
    log_q = jax.nn.log_softmax(student / temperature)
    divergence = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
    total = jnp.sum(taught.weights)
    loss = temperature**2 * jnp.sum(divergence * taught.weights) / jnp.maximum(total, 1e-6)
    return loss, _metrics(batch, blocks, taught, teacher, student, loss)


def _metrics(
    batch: Packed, blocks: Blocks, taught: Supervision, teacher: jax.Array, student: jax.Array, loss: jax.Array
) -> BlockMetrics:
    slots = jnp.arange(student.shape[2])[None, None]
    counted = (taught.weights > 0) & (slots > blocks.filled[..., None])
    guess = jnp.argmax(student, axis=-1)
    agree = counted & (guess == jnp.argmax(teacher, axis=-1))
    rows = jnp.arange(batch.tokens.shape[0])[:, None, None]
    truth = batch.tokens[rows, jnp.clip(taught.source + 1, 0, batch.tokens.shape[1] - 1)]
    right = (counted & (guess == truth))[..., 1:]
    leading = jnp.sum(jnp.cumprod(right.astype(jnp.int32), axis=-1), axis=-1)
    chains = blocks.live & (blocks.filled == 0)
    return BlockMetrics(
        loss,
        jnp.sum(agree) / jnp.maximum(jnp.sum(counted), 1),
        jnp.sum(jnp.where(chains, leading + 1, 0)) / jnp.maximum(jnp.sum(chains), 1),
    )
