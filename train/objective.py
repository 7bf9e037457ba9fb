"""The distillation objective: blocks sampled from documents, one pass of the head over all, weighted losses.

Axis letters: B rows, L row length, A anchors (blocks) a row, S slots a block (block_size), E features, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax.head import DraftHead
from jetspec_jax.layers import Attend, KeyValue
from jetspec_jax.rope import rope_at
from jetspec_jax.sharding import parts
from jetspec_jax.target import TargetModel
from train.attention import block_attention
from train.chunked import Lessons, SlotResults, Student, automatic_chunk, chunked_loss
from train.data import Packed
from train.losses import check_loss


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


class BlockMetrics(NamedTuple):
    """Sums over a batch's blocks: those of several batches add up (`jax.tree.map(operator.add, one, other)`).

    The properties are the means of what was added.

    total: float32, the weighted sum of the losses of all slots.
    weight: float32, the sum of weights.
    slots, supervised: int32, how many slots there are, and how many have a loss.
    agreeing, guesses: int32 `[S - 1]`, for MASK slots 1 .. S - 1 of blocks as decoding drafts them (no true tokens
        filled in): how often the head's argmax is the target's, of how many that are supervised.
    committed, chains: int32, tokens that a chain round would commit (the leading slots that agree with the text, and
        the bonus token), and in how many such blocks.
    """

    total: jax.Array
    weight: jax.Array
    slots: jax.Array
    supervised: jax.Array
    agreeing: jax.Array
    guesses: jax.Array
    committed: jax.Array
    chains: jax.Array

    @property
    def loss(self) -> jax.Array:
        """The objective; 0 without any supervised slot."""
        return self.total / jnp.maximum(self.weight, 1e-6)

    @property
    def agreement(self) -> jax.Array:
        """`[S - 1]`, the share of each slot's guesses that are the target's argmax."""
        return self.agreeing / jnp.maximum(self.guesses, 1)

    @property
    def accepted(self) -> jax.Array:
        """Simulated accepted length: tokens that a chain round would commit."""
        return self.committed / jnp.maximum(self.chains, 1)

    @property
    def coverage(self) -> jax.Array:
        """The share of slots that have a loss."""
        return self.supervised / jnp.maximum(self.slots, 1)


def sample_blocks(batch: Packed, anchors: int, block_size: int, mixed_fill: float, rng: np.random.Generator) -> Blocks:
    """Random anchors among response tokens that another follows; a share `mixed_fill` of the blocks is filled.

    The last token of an answer is none: decoding ends there.

    A row with fewer usable tokens than `anchors` repeats none: its surplus blocks are not live.
    """
    rows, length = batch.tokens.shape
    anchors = min(anchors, length)
    successor = np.zeros((rows, length), bool)
    successor[:, :-1] = (batch.documents[:, 1:] == batch.documents[:, :-1]) & (batch.documents[:, :-1] > 0)
    successor[:, :-1] &= batch.response[:, 1:]
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
    return jnp.where(slots <= blocks.filled[..., None], _at(batch.tokens, index), mask_token_id)


def supervision(batch: Packed, blocks: Blocks, block_size: int, gamma: float) -> Lessons:
    """What each slot `[B, A, S]` learns, and its weight (paper section 3; docs/design.md).

    A MASK slot i learns the distribution of token anchor + i, which the target gives at anchor + i - 1. A filled
    slot already knows its own token and learns the one after it; the anchor counts as filled in filled blocks and
    learns nothing in others. A slot whose predicted token lies past its document, or past the answer that the anchor
    is in, learns nothing. Weights decay with the distance from the anchor to the predicted token:
    exp(-(distance - 1) / gamma). The parent of a slot's token is the true one before it, whether the slot's block
    shows it or not (teacher forcing).
    """
    length = batch.tokens.shape[1]
    slots = jnp.arange(block_size)[None, None]
    filled = blocks.filled[..., None]
    known = slots <= filled
    ahead = jnp.where(known, slots, slots - 1)  # the predicted token is the one after anchor + ahead
    source = blocks.anchors[..., None] + ahead
    document = _at(batch.documents, blocks.anchors)[..., None]
    predicted = jnp.clip(source + 1, 0, length - 1)
    inside = (source + 1 < length) & (_at(batch.documents, predicted) == document) & _at(batch.response, predicted)
    inside = jnp.cumprod(inside, axis=-1, dtype=jnp.int32) > 0  # the answer to the next message is another's
    counted = inside & blocks.live[..., None] & ((slots > 0) | (filled > 0))
    decay = jnp.exp(-ahead.astype(jnp.float32) / gamma) if gamma else jnp.ones(ahead.shape)
    source = jnp.clip(source, 0, length - 1)
    return Lessons(source, _at(batch.tokens, predicted), _at(batch.tokens, source), jnp.where(counted, decay, 0.0))


def draft_blocks(head: DraftHead, target: TargetModel, batch: Packed, taps: jax.Array, blocks: Blocks) -> jax.Array:
    """The head's final hidden states `[B, A, S, E]` of all blocks, in one pass and in the head's dtype.

    A slot sees fused features of its own document strictly before its anchor, and slots of its own block: those
    up to itself (causal head) or all. This is the decode-time computation, so that logits are the same.

    Args:
        taps: `[B, L, T * E]`, the target's tapped outputs on `batch`.
    """
    config = head.config
    rows, length = batch.tokens.shape
    count, size = blocks.anchors.shape[1], config.block_size
    dtype = head.norm.weight[...].dtype
    tokens = block_inputs(batch, blocks, size, config.mask_token_id)
    positions = _at(batch.positions, blocks.anchors)[..., None] + jnp.arange(size)[None, None]
    before = jnp.arange(length)[None, None] < blocks.anchors[..., None]
    seen = before & (batch.documents[:, None] == _at(batch.documents, blocks.anchors)[..., None])
    prefix = head.context_rows(taps.astype(dtype), rope_at(batch.positions, config))
    attends = [_attend_to(layer, seen, size, config.causal_head) for layer in prefix]
    flat = lambda x: x.reshape(rows, count * size, *x.shape[3:])  # noqa: E731
    hidden = head.run(flat(target.embed(tokens)).astype(dtype), rope_at(flat(positions), config), attends)
    return hidden.reshape(rows, count, size, -1)


def _attend_to(context: KeyValue, seen: jax.Array, size: int, causal: bool) -> Attend:
    """Attention of blocks of `size` slots, side by side, to one layer's context and to themselves."""

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        apart = lambda x: x.reshape(x.shape[0], -1, size, *x.shape[2:])  # noqa: E731
        out = block_attention(apart(query), KeyValue(apart(key), apart(value)), context, seen, causal=causal)
        return out.reshape(query.shape)

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
    loss: str = "forward_kl",
    compute_dtype: jnp.dtype | None = None,
    logit_chunk: int = 0,
) -> tuple[jax.Array, BlockMetrics]:
    """`sum(w loss) / sum(w)` over all supervised slots, in float32, and metrics (paper section 3).

    The head alone has a gradient, in the dtype of its weights; the target is frozen.

    Args:
        taps, hidden: the target's outputs `[B, L, ...]` on `batch`.
        gamma: the loss's decay over slots; 0 is none.
        temperature: of both distributions.
        loss: a name of `train.losses.LOSSES`.
        compute_dtype: what the head computes in; its weights' own by default.
        logit_chunk: slots of each row whose logits are held at once; 0 is what `automatic_chunk` gives for the rows
            and words of one device.

    Raises:
        ValueError: no such loss, or a temperature or chunk that cannot be.
    """
    check_loss(loss, temperature)
    if logit_chunk < 0:
        raise ValueError(f"--config.logit_chunk is a number of slots, or 0 for an automatic one; got {logit_chunk}")
    target, taps, hidden = jax.lax.stop_gradient((target, taps, hidden))
    if compute_dtype is not None:
        head = jax.tree.map(lambda x: x.astype(compute_dtype), head)
    drafted = draft_blocks(head, target, batch, taps, blocks)
    lessons = supervision(batch, blocks, head.config.block_size, gamma)
    drafted, lessons = jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[3:]), (drafted, lessons))
    rows, slots = lessons.weights.shape
    words = target.config.vocab_size // parts("vocab")
    chunk = logit_chunk or automatic_chunk(words, max(1, rows // parts("batch")), slots)
    student = Student(drafted, head.parent if head.config.parent_rank else None)
    results = chunked_loss(student, target, hidden, lessons, loss, temperature, chunk)
    metrics = _metrics(blocks, lessons, results, head.config.block_size)
    return metrics.loss, jax.lax.stop_gradient(metrics)


def _metrics(blocks: Blocks, lessons: Lessons, results: SlotResults, size: int) -> BlockMetrics:
    in_blocks = lambda x: x.reshape(*blocks.anchors.shape, size)[..., 1:]  # noqa: E731
    count = lambda x, axis=None: jnp.sum(x, axis=axis, dtype=jnp.int32)  # noqa: E731
    supervised = lessons.weights > 0
    chains = blocks.live & (blocks.filled == 0)
    drafted = in_blocks(supervised) & chains[..., None]
    right = in_blocks(results.guess == lessons.truth) & drafted
    leading = jnp.cumprod(right, axis=-1, dtype=jnp.int32)
    return BlockMetrics(
        total=results.loss,
        weight=jnp.sum(lessons.weights),
        slots=jnp.int32(supervised.size),
        supervised=count(supervised),
        agreeing=count(in_blocks(results.guess == results.best) & drafted, (0, 1)),
        guesses=count(drafted, (0, 1)),
        committed=count(leading) + count(chains),
        chains=count(chains),
    )


@jax.vmap
def _at(row: np.ndarray | jax.Array, places: np.ndarray | jax.Array) -> jax.Array:
    """`[B, ...]`, what each row of `[B, L]` has at its `places`; row by row, so that rows may be on many devices."""
    return row[places]
