"""One suite for every backend of `tree_attention`: against float64 NumPy, whatever lies where none may look.

On a machine without a GPU the Pallas kernel runs interpreted; on one with a GPU the same tests run it compiled.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import POISONS, arguments, tree_mask
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.pallas.tree_attention import pack_mask, tree_attention
from kernels.pallas.tree_attention.reference import reference

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}
attend = jax.jit(tree_attention, static_argnames=("scale", "backend"))
property_test = lambda examples: settings(max_examples=examples, deadline=None, derandomize=True, database=None)  # noqa: E731


@pytest.fixture(params=["xla", "pallas"])
def backend(request):
    return request.param


def check(args, backend, **options):
    """Asserts that the backend's output is the reference's."""
    out = attend(**args, backend=backend, **options)
    expected = reference(**args, **options)
    assert out.shape == args["query"].shape
    assert out.dtype == args["query"].dtype
    tolerance = TOLERANCE[str(out.dtype)]
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=tolerance, atol=tolerance)


@st.composite
def shapes(draw):
    """Any call that the kernel serves; mostly small ones, for each compiles."""
    few = st.integers(1, 40)
    return {
        "nodes": draw(few | st.sampled_from([1, 31, 32, 33, 64, 300])),
        "capacity": draw(few | st.sampled_from([700, 2000])),
        "kv_heads": draw(st.sampled_from([1, 2])),
        "group": draw(st.sampled_from([1, 2, 3, 4, 7, 16])),
        "head_dim": draw(st.sampled_from([32, 64, 128, 256])),
        "dtype": draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        "page_size": draw(st.sampled_from([None, 16, 24, 128])),
    }


def ragged(draw, batch, capacity):
    lengths = st.integers(0, capacity) | st.sampled_from([0, 1, capacity])
    return draw(st.lists(lengths, min_size=batch, max_size=batch))


@pytest.mark.parametrize("backend", ["xla", "pallas"])
@property_test(6)
@given(
    data=st.data(), shape=shapes(), batch=st.integers(1, 4), seed=st.integers(0, 99), poison=st.sampled_from(POISONS)
)
def test_any_shape_is_softmax_attention_to_the_prefix_and_the_visible_nodes(backend, data, shape, batch, seed, poison):
    """Shapes that are multiples of nothing, ragged lengths, trees, groups, dtypes, pages in random order, poison."""
    lengths = ragged(data.draw, batch, shape["capacity"])
    check(arguments(seed, lengths, poison=poison, **shape), backend)


BUCKETS = [
    {"nodes": 37, "capacity": 700, "kv_heads": 2, "group": 3},
    {"nodes": 5, "capacity": 600, "kv_heads": 1, "group": 4, "page_size": 16},
    {"nodes": 1, "capacity": 2000, "kv_heads": 2, "group": 1},
]


@pytest.mark.parametrize("backend", ["xla", "pallas"])
@property_test(25)
@given(data=st.data(), bucket=st.sampled_from(BUCKETS), seed=st.integers(0, 99), poison=st.sampled_from(POISONS))
def test_any_data_of_a_few_shapes(backend, data, bucket, seed, poison):
    """Many lengths, trees and page orders of shapes that are compiled once."""
    check(arguments(seed, ragged(data.draw, 3, bucket["capacity"]), poison=poison, **bucket), backend)


@pytest.mark.parametrize(
    ("nodes", "capacity", "lengths", "options"),
    [
        (1, 40, (0, 1, 40), {"group": 1}),  # plain decoding; a cache shorter than a tile
        (65, 512, (511, 0, 512), {"group": 3}),  # whole tiles of the prefix, masks of three words
        (300, 1200, (1025, 512, 3), {"kv_heads": 1}),  # a tree larger than any tile
        (257, 2000, (2000,), {"dtype": "bfloat16", "group": 4, "head_dim": 128, "page_size": 64}),  # Qwen3's heads
    ],
)
def test_what_lies_past_the_length_changes_no_bit(backend, nodes, capacity, lengths, options):
    """The same bits with NaN, inf and large numbers there, and the right ones."""
    outs = []
    for poison in POISONS:
        args = arguments(nodes, lengths, nodes, capacity=capacity, poison=poison, **options)
        outs.append(np.asarray(attend(**args, backend=backend)))
        np.testing.assert_array_equal(outs[0], outs[-1])
    check(args, backend)


def test_nodes_that_see_nothing_give_exactly_zero_and_change_no_other(backend):
    """Random masks with empty rows, of sequences without a prefix; 33 nodes leave spare bits in the last word."""
    mask = np.random.default_rng(1).random((2, 33, 33)) < 0.5
    mask[:, ::4] = False
    args = arguments(1, (0, 5), 33, capacity=40, mask=mask)
    assert (np.asarray(attend(**args, backend=backend))[0, ::4] == 0).all()
    check(args, backend)


def test_bits_past_the_last_node_are_ignored(backend):
    """33 nodes use one bit of the second word; the other 31 are set, and mean nothing."""
    args = arguments(1, (3, 5), 33, capacity=40)
    expected = attend(**args, backend=backend)
    args["mask"][..., 1] |= np.uint32(0xFFFFFFFE)
    np.testing.assert_array_equal(attend(**args, backend=backend), expected)


def test_one_mask_serves_every_row(backend):
    """A mask of batch 1 is the same as its repetition."""
    args = arguments(2, (3, 7, 0), 5)
    one = args | {"mask": args["mask"][:1]}
    every = args | {"mask": np.repeat(args["mask"][:1], 3, axis=0)}
    np.testing.assert_array_equal(attend(**one, backend=backend), attend(**every, backend=backend))
    check(one, backend)


def test_a_contiguous_cache_is_the_trivial_page_table(backend):
    """The same bits from a cache and from its rows as pages, in order."""
    args = arguments(3, (64, 33, 0), 5)
    paged = lambda x: x.reshape(3, 2, 4, 16, 32).swapaxes(1, 2).reshape(12, 2, 16, 32)  # noqa: E731
    pool = {name: paged(args[name]) for name in ("cache_key", "cache_value")}
    table = np.arange(12, dtype=np.int32).reshape(3, 4)
    out = attend(**args | pool, page_table=table, backend=backend)
    np.testing.assert_array_equal(out, attend(**args, backend=backend))


def test_64_bit_types_change_no_bit(backend):
    """With jax_enable_x64 a kernel still counts in int32; several programs share the prefix here."""
    args = arguments(4, (600, 0), 33, capacity=700, page_size=16)
    expected = attend(**args, backend=backend)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(attend(**args, backend=backend), expected)


def test_scale_is_the_callers_and_large_scores_stay_finite(backend):
    """Scores of many thousand: the softmax is taken relative to its maximum, also across chunks."""
    args = arguments(3, (600, 90), 5, capacity=700)
    out = np.asarray(attend(**args, scale=500.0, backend=backend))
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, reference(**args, scale=500.0), rtol=0, atol=1e-2)


def test_gradients_are_the_dense_formulas_and_zero_through_fully_masked_rows(backend):
    """The backward pass of a padded batch: no NaN, nothing flows through a node that sees nothing, the rest is exact.

    The dense formula's own softmax would give NaN in such a row, so it is told to see something and is left out.
    """
    rng = np.random.default_rng(5)
    mask = tree_mask(rng, 2, 5) | (rng.random((2, 5, 5)) < 0.5)
    mask[:, :, 2] = False  # node 2 is seen by none
    mask[0, 2] = False  # and, where there is no prefix, sees nothing
    args = arguments(5, (0, 5), 5, kv_heads=2, group=1, capacity=16, mask=mask, poison=1.0)
    lengths, bits = args.pop("lengths"), args.pop("mask")
    floats = {k: jnp.asarray(v) for k, v in args.items()}
    prefix = np.broadcast_to(np.arange(16) < lengths[:, None, None], (2, 5, 16))
    seen = np.concatenate([prefix, mask], -1)
    empty = ~seen.any(-1)
    assert empty.sum() == 1

    def dense(floats):
        keys = jnp.concatenate([floats["cache_key"].swapaxes(1, 2), floats["key"]], 1)
        values = jnp.concatenate([floats["cache_value"].swapaxes(1, 2), floats["value"]], 1)
        scores = jnp.einsum("bnhd,bmhd->bhnm", floats["query"], keys) * 32**-0.5
        weights = jax.nn.softmax(jnp.where((seen | empty[:, :, None])[:, None], scores, -jnp.inf), -1)
        out = jnp.einsum("bhnm,bmhd->bnhd", weights, values)
        return jnp.sum(jnp.sin(jnp.where(empty[:, :, None, None], 0.0, out)))

    def ours(floats):
        return jnp.sum(jnp.sin(tree_attention(**floats, lengths=lengths, mask=bits, backend=backend)))

    got, expected = jax.jit(lambda x: (jax.grad(ours)(x), jax.grad(dense)(x)))(floats)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), got, expected)
    assert (got["query"][0, 2] == 0).all()
    assert (got["key"][:, 2] == 0).all()
    assert (got["value"][:, 2] == 0).all()
    assert (got["cache_key"][0] == 0).all()


def test_the_reference_is_attention_worked_by_hand():
    """Two prefix rows and two nodes whose weights are 1 : 3 : 4 by their logarithms; node 0 does not see node 1."""
    one = np.ones((1, 1, 1, 1))
    args = {
        "query": np.concatenate([one, one], 1),
        "key": np.log([3.0, 4.0]).reshape(1, 2, 1, 1),
        "value": np.array([10.0, 100.0]).reshape(1, 2, 1, 1),
        "cache_key": np.array([0.0, np.nan]).reshape(1, 1, 2, 1),
        "cache_value": np.array([1.0, np.nan]).reshape(1, 1, 2, 1),
    }
    mask = np.asarray(pack_mask(jnp.asarray([[[True, False], [True, True]]])))
    out = reference(**args, lengths=np.array([1]), mask=mask)
    np.testing.assert_allclose(out.ravel(), [(1 + 3 * 10) / 4, (1 + 3 * 10 + 4 * 100) / 8])
