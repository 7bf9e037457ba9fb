"""`tree_attention` against a float64 reference written as loops, whatever lies past the cached lengths."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.pallas.tree_attention import causal_mask, full_mask, pack_mask, tree_attention, unpack_mask

attend = jax.jit(tree_attention, static_argnames="scale")


def reference(query, key, value, cache_key, cache_value, lengths, mask, scale):
    """Softmax over the visible keys of every row, node and head, one at a time, in float64."""
    out = np.zeros(query.shape)
    groups = query.shape[2] // key.shape[2]
    for b, length in enumerate(lengths):
        keys = np.concatenate([cache_key[b, :, :length].swapaxes(0, 1), key[b]]).astype(np.float64)
        values = np.concatenate([cache_value[b, :, :length].swapaxes(0, 1), value[b]]).astype(np.float64)
        for n in range(query.shape[1]):
            visible = np.concatenate([np.ones(length, bool), mask[b if mask.shape[0] > 1 else 0, n]])
            if not visible.any():
                continue
            for h in range(query.shape[2]):
                scores = keys[visible, h // groups] @ query[b, n, h].astype(np.float64) * scale
                weights = np.exp(scores - scores.max())
                out[b, n, h] = weights @ values[visible, h // groups] / weights.sum()
    return out


def inputs(seed, lengths, nodes, heads, kv_heads, head_dim, capacity, poison=None, density=0.5):
    """Random arguments, with a random mask; cache rows at and past each length hold `poison`."""
    rng = np.random.default_rng(seed)
    batch = len(lengths)

    def normal(*shape):
        return rng.normal(0, 1, shape).astype(np.float32)

    args = {
        "query": normal(batch, nodes, heads, head_dim),
        "key": normal(batch, nodes, kv_heads, head_dim),
        "value": normal(batch, nodes, kv_heads, head_dim),
        "cache_key": normal(batch, kv_heads, capacity, head_dim),
        "cache_value": normal(batch, kv_heads, capacity, head_dim),
        "lengths": np.array(lengths, np.int32),
    }
    if poison is not None:
        for b, length in enumerate(lengths):
            args["cache_key"][b, :, length:] = poison
            args["cache_value"][b, :, length:] = poison
    return args, rng.random((batch, nodes, nodes)) < density


def packed(args, mask):
    return {**args, "mask": pack_mask(jnp.asarray(mask))}


def tree_mask(rng, batch, nodes):
    """Ancestor masks of random trees."""
    mask = np.zeros((batch, nodes, nodes), bool)
    for b in range(batch):
        for n in range(nodes):
            if n:
                mask[b, n] = mask[b, rng.integers(0, n)]
            mask[b, n, n] = True
    return mask


@pytest.mark.parametrize(
    ("nodes", "heads", "kv_heads", "capacity", "lengths"),
    [
        (1, 4, 4, 40, (0, 1, 40)),  # capacity below the chunk of 512, no groups
        (5, 6, 2, 512, (511, 0, 512)),  # one whole chunk, groups of 3
        (33, 4, 2, 700, (513, 0, 700)),  # a second, shifted chunk; masks of two words
        (300, 2, 1, 1200, (1025, 512, 3)),  # three chunks, one kv head
    ],
)
def test_output_is_softmax_attention_to_the_prefix_and_the_visible_nodes(nodes, heads, kv_heads, capacity, lengths):
    """Ragged rows of length 0 up to the capacity, under tree masks, with NaN, inf and large numbers past them."""
    for poison in (np.nan, np.inf, -np.inf, 1e30):
        args, _ = inputs(nodes, lengths, nodes, heads, kv_heads, 8, capacity, poison)
        mask = tree_mask(np.random.default_rng(nodes), len(lengths), nodes)
        out = attend(**packed(args, mask))
        assert out.shape == args["query"].shape
        assert out.dtype == jnp.float32
        if np.isnan(poison):
            expected = reference(**args, mask=mask, scale=8**-0.5)
            clean = out
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(out, clean)  # what lies past the length changes nothing at all


def test_nodes_that_see_nothing_give_exactly_zero_and_change_no_other():
    """Random masks with empty rows, of sequences without a prefix; 33 nodes leave spare bits in the last word."""
    args, mask = inputs(1, (0, 5), 33, 4, 2, 8, 40, np.nan)
    mask[:, ::4] = False
    out = np.asarray(attend(**packed(args, mask)))
    assert (out[0, ::4] == 0).all()
    np.testing.assert_allclose(out, reference(**args, mask=mask, scale=8**-0.5), rtol=0, atol=1e-5)


def test_one_mask_serves_every_row():
    """A mask of batch 1 is the same as its repetition."""
    args, mask = inputs(2, (3, 7), 5, 4, 2, 8, 16)
    out = attend(**packed(args, mask[:1]))
    np.testing.assert_allclose(out, reference(**args, mask=mask[:1], scale=8**-0.5), rtol=0, atol=1e-5)


def test_scale_is_the_callers_and_large_scores_stay_finite():
    """Scores of several thousand: the softmax is taken relative to its maximum, also across chunks."""
    args, mask = inputs(3, (600, 90), 5, 4, 2, 8, 700)
    out = attend(**packed(args, mask), scale=500.0)
    expected = reference(**args, mask=mask, scale=500.0)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, expected, rtol=0, atol=5e-3)


@pytest.mark.parametrize("capacity", [64, 700])
def test_bfloat16_is_within_a_hundredth(capacity):
    """Inputs and output bfloat16, softmax and accumulation float32, against float64 on the same rounded inputs."""
    args, _ = inputs(4, (capacity, 50), 33, 4, 2, 16, capacity, np.nan)
    mask = tree_mask(np.random.default_rng(0), 2, 33)
    args = {k: v if k == "lengths" else jnp.asarray(v, jnp.bfloat16) for k, v in args.items()}
    out = attend(**packed(args, mask))
    assert out.dtype == jnp.bfloat16
    exact = {k: np.asarray(v, np.int32 if k == "lengths" else np.float32) for k, v in args.items()}
    expected = reference(**exact, mask=mask, scale=16**-0.5)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=1e-2, atol=1e-2)


def test_gradients_are_the_dense_formulas_and_zero_through_fully_masked_rows():
    """The backward pass of a padded batch: no NaN, nothing flows through a node that sees nothing, the rest is exact.

    The dense formula's own softmax would give NaN in such a row, so it is told to see something and is left out.
    """
    args, mask = inputs(5, (0, 5), 5, 2, 2, 8, 16, density=0.7)
    mask |= np.eye(5, dtype=bool)
    mask[:, :, 2] = False  # node 2 is seen by none
    mask[0, 2] = False  # and, where there is no prefix, sees nothing
    floats = {k: jnp.asarray(v) for k, v in args.items() if k != "lengths"}
    prefix = np.broadcast_to(np.arange(16) < args["lengths"][:, None, None], (2, 5, 16))
    seen = np.concatenate([prefix, mask], -1)
    empty = ~seen.any(-1)
    assert empty.sum() == 1

    def dense(floats):
        keys = jnp.concatenate([floats["cache_key"].swapaxes(1, 2), floats["key"]], 1)
        values = jnp.concatenate([floats["cache_value"].swapaxes(1, 2), floats["value"]], 1)
        scores = jnp.einsum("bnhd,bmhd->bhnm", floats["query"], keys) * 8**-0.5
        weights = jax.nn.softmax(jnp.where((seen | empty[:, :, None])[:, None], scores, -jnp.inf), -1)
        out = jnp.einsum("bhnm,bmhd->bnhd", weights, values)
        return jnp.sum(jnp.sin(jnp.where(empty[:, :, None, None], 0.0, out)))

    def ours(floats):
        return jnp.sum(jnp.sin(tree_attention(**floats, lengths=args["lengths"], mask=pack_mask(jnp.asarray(mask)))))

    got, expected = jax.jit(lambda x: (jax.grad(ours)(x), jax.grad(dense)(x)))(floats)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5), got, expected)
    assert (got["query"][0, 2] == 0).all()
    assert (got["key"][:, 2] == 0).all()
    assert (got["value"][:, 2] == 0).all()
    assert (got["cache_key"][0] == 0).all()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("key", (2, 4, 2, 8)),
        ("key", (2, 5, 2, 6)),
        ("value", (2, 5, 1, 8)),
        ("cache_key", (3, 2, 16, 8)),
        ("cache_key", (2, 4, 16, 8)),
        ("cache_value", (2, 2, 15, 8)),
        ("lengths", (3,)),
        ("mask", (2, 5, 2)),
        ("mask", (2, 4, 1)),
        ("mask", (3, 5, 1)),
    ],
)
def test_a_misshapen_argument_is_refused_by_name(name, wrong):
    """A ValueError that names the argument, before anything runs."""
    args, mask = inputs(0, (3, 7), 5, 4, 2, 8, 16)
    args = packed(args, mask)
    args[name] = np.zeros(wrong, args[name].dtype)
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        tree_attention(**args)


def test_heads_and_mask_dtype_are_checked():
    """Query heads must be a multiple of kv heads, and a mask must be packed."""
    args, mask = inputs(0, (3, 7), 5, 4, 2, 8, 16)
    args = packed(args, mask)
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2 kv heads"):
        tree_attention(**{**args, "query": args["query"][:, :, :3]})
    with pytest.raises(ValueError, match=r"mask is int32.*expected uint32"):
        tree_attention(**{**args, "mask": args["mask"].astype(jnp.int32)})
    with pytest.raises(ValueError, match="mask"):
        tree_attention(**{**args, "mask": jnp.asarray(mask)})


@pytest.mark.parametrize("nodes", [1, 31, 32, 33, 300])
def test_unpacking_a_packed_mask_gives_it_back(nodes):
    """Bit j % 32 of word j // 32 is node j; spare bits are 0."""
    mask = np.random.default_rng(nodes).random((2, 3, nodes)) < 0.5
    mask[0, 0], mask[0, 1] = True, False
    bits = np.asarray(pack_mask(jnp.asarray(mask)))
    assert bits.dtype == np.uint32
    assert bits.shape == (2, 3, -(-nodes // 32))
    expected = np.zeros(bits.shape, np.uint64)
    for node in range(nodes):
        expected[..., node // 32] += mask[..., node].astype(np.uint64) << np.uint64(node % 32)
    np.testing.assert_array_equal(bits, expected)
    np.testing.assert_array_equal(unpack_mask(jnp.asarray(bits), nodes), mask)


def test_causal_and_full_masks():
    """Node i sees nodes 0..i, or every node."""
    np.testing.assert_array_equal(unpack_mask(causal_mask(33), 33), np.tri(33, dtype=bool)[None])
    np.testing.assert_array_equal(unpack_mask(full_mask(33), 33), np.ones((1, 33, 33), bool))
