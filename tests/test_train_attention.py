"""Attention in chunks is attention under a dense mask, gradients included, and its memory is that of a chunk."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.layers import KeyValue
from train.attention import block_attention, document_attention

pytestmark = pytest.mark.usefixtures("compile_quickly")

ROWS, LENGTH, BLOCKS, SLOTS, HEADS, KV_HEADS, SIZE = 2, 11, 5, 3, 4, 2, 8
DOCUMENTS = np.array([[1] * 4 + [2] * 5 + [0] * 2, [1] * 11], np.int32)
RNG = np.random.default_rng(0)


def draw(*shape):
    return RNG.normal(size=(ROWS, *shape, SIZE)).astype(np.float32)


QUERY = draw(BLOCKS, SLOTS, HEADS)
OWN = KeyValue(*(draw(BLOCKS, SLOTS, KV_HEADS) for _ in range(2)))
CONTEXT = KeyValue(*(draw(LENGTH, KV_HEADS) for _ in range(2)))
SEEN = RNG.random((ROWS, BLOCKS, LENGTH)) < 0.5
SEEN[0, 1] = False  # a block at its document's start has no context
TOKENS = [draw(LENGTH, heads) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def dense(query, key, value, mask):
    """Attention `[B, N, H, D]` with all scores at once, under `mask` `[B, N, M]`."""
    key, value = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (key, value))
    scores = jnp.einsum("bnhd,bmhd->bhnm", query, key) / np.sqrt(SIZE)
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhnm,bmhd->bnhd", weights, value)


def dense_blocks(query, own, context, causal):
    """Blocks side by side, each blind to the others' slots."""
    flat = lambda x: x.reshape(ROWS, BLOCKS * SLOTS, *x.shape[3:])  # noqa: E731
    within = np.kron(np.eye(BLOCKS), np.tri(SLOTS) if causal else np.ones((SLOTS, SLOTS))) > 0
    mask = np.concatenate(
        [np.repeat(SEEN, SLOTS, axis=1), np.broadcast_to(within[None], (ROWS, *within.shape))], axis=2
    )
    rows = [jnp.concatenate([outer, flat(inner)], axis=1) for outer, inner in zip(context, own, strict=True)]
    return dense(flat(query), *rows, mask).reshape(query.shape)


def with_gradient(attend, *args):
    """The output and the gradient of an uneven sum of it with respect to every argument."""
    weights = np.random.default_rng(9).normal(size=args[0].shape).astype(np.float32)

    def total(*args):
        out = attend(*args)
        return jnp.sum(out.astype(jnp.float32) * weights), out

    (_, out), gradients = jax.jit(jax.value_and_grad(total, tuple(range(len(args))), has_aux=True))(*args)
    return out, gradients


close = functools.partial(jax.tree.map, functools.partial(np.testing.assert_allclose, atol=1e-5))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("chunk", [None, 1, 2, 3])
def test_block_attention_is_attention_under_a_dense_mask(chunk, causal):
    """Outputs and gradients to 1e-5, in chunks that divide the blocks and in others, with and without context."""
    have = with_gradient(lambda *x: block_attention(*x, SEEN, causal=causal, chunk=chunk), QUERY, OWN, CONTEXT)
    close(have, with_gradient(lambda *x: dense_blocks(*x, causal), QUERY, OWN, CONTEXT))


@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_document_attention_is_attention_under_a_dense_mask(chunk):
    """Outputs and gradients to 1e-5; padding attends to padding and stays finite."""
    mask = (DOCUMENTS[:, :, None] == DOCUMENTS[:, None]) & np.tri(LENGTH, dtype=bool)[None]
    have = with_gradient(lambda *x: document_attention(*x, DOCUMENTS, chunk), *TOKENS)
    close(have, with_gradient(lambda *x: dense(*x, mask), *TOKENS))


def test_bfloat16_gradients_do_not_lose_more_by_being_summed_over_chunks():
    """The context's gradient in one chunk and in five, against float32's: the same error but for a rounding."""
    args = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), (QUERY, OWN, CONTEXT))
    exact = with_gradient(
        lambda *x: block_attention(*x, SEEN, causal=True), *jax.tree.map(lambda x: x.astype(jnp.float32), args)
    )[1][2]
    errors = []
    for chunk in (BLOCKS, 1):
        context = with_gradient(lambda *x: block_attention(*x, SEEN, causal=True, chunk=chunk), *args)[1][2]  # noqa: B023
        assert context.key.dtype == jnp.bfloat16
        errors.append(np.abs(context.value.astype(np.float32) - exact.value).max() / np.abs(exact.value).max())
    assert max(errors) < 0.02
