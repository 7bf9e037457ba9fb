"""The contract of `tree_attention`: what is refused, which backend serves, masks as bits, tiles."""

import logging
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import arguments, tree_mask

from kernels.pallas.tree_attention import (
    api,
    causal_mask,
    full_mask,
    pack_mask,
    parents_mask,
    tree_attention,
    unpack_mask,
)
from kernels.pallas.tree_attention.tiles import TileConfig, prefix_splits, shared_bytes, tile_config
from kernels.topology import CHIPS, compiling_for


def shaped(**changes):
    """Shapes of a call that the kernel serves, with some arguments changed."""
    args = arguments(0, (3, 7), 5, capacity=16)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in args.items()}
    return shapes | {name: jax.ShapeDtypeStruct(*change) for name, change in changes.items()}


def call(shapes, **options):
    """Traces a call; nothing is compiled."""
    return jax.eval_shape(lambda args: tree_attention(**args, **options), shapes)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("key", (2, 4, 2, 32)),
        ("key", (2, 5, 2, 6)),
        ("value", (2, 5, 1, 32)),
        ("cache_key", (3, 2, 16, 32)),
        ("cache_key", (2, 4, 16, 32)),
        ("cache_value", (2, 2, 15, 32)),
        ("lengths", (3,)),
        ("mask", (2, 5, 2)),
        ("mask", (2, 4, 1)),
        ("mask", (3, 5, 1)),
        ("page_table", (3, 1)),
    ],
)
def test_a_misshapen_argument_is_refused_by_name(name, wrong):
    """A ValueError that names the argument, before anything runs."""
    dtype = {"lengths": np.int32, "mask": np.uint32, "page_table": np.int32}.get(name, np.float32)
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        call(shaped(**{name: (wrong, dtype)}))


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "message"),
    [
        ("query", (2, 5, 3, 32), np.float32, "3 query heads are not a multiple of 2 kv heads"),
        ("mask", (2, 5, 1), np.int32, "mask is int32.*expected uint32"),
        ("mask", (2, 5, 5), np.bool_, "mask"),
        ("lengths", (2,), np.int16, "lengths is int16, expected int32"),
        ("cache_value", (2, 2, 16, 32), np.float16, "cache_value is float16, and query float32"),
    ],
)
def test_heads_and_dtypes_are_checked(name, shape, dtype, message):
    with pytest.raises(ValueError, match=message):
        call(shaped(**{name: (shape, dtype)}))


def test_a_forced_kernel_that_cannot_serve_lists_every_reason():
    """Four reasons in one message; the same call runs on XLA when nothing is forced."""
    floats = {"query": (2, 600, 34, 24), "key": (2, 600, 2, 24), "value": (2, 600, 2, 24),
              "cache_key": (9, 2, 8, 24), "cache_value": (9, 2, 8, 24)}  # fmt: skip
    wrong = {name: (shape, np.float32) for name, shape in floats.items()}
    shapes = shaped(**wrong, mask=((1, 600, 19), np.uint32), page_table=((2, 4), np.int32))
    with pytest.raises(ValueError, match="no Pallas kernel serves this call") as error:
        call(shapes, backend="pallas")
    for reason in ("head_dim 24", "17 query heads per kv head", "600 nodes", "page size 8"):
        assert reason in str(error.value)
    assert call(shapes).shape == (2, 600, 34, 24)
    with pytest.raises(ValueError, match="backend must be one of auto, pallas, xla, got 'cuda'"):
        call(shapes, backend="cuda")


def test_the_choice_is_logged_once(caplog):
    """One line per choice and process, however many layers ask; it names what serves where, or why not."""
    api._announce.cache_clear()
    declined = shaped(**{name: ((2, 5, 2, 8), np.float32) for name in ("key", "value")},
                      **{name: ((2, 2, 16, 8), np.float32) for name in ("cache_key", "cache_value")},
                      query=((2, 5, 4, 8), np.float32))  # fmt: skip
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            call(shaped())
            call(declined)
            call(shaped(), backend="pallas")
            call(shaped(), backend="xla")
    assert [record.message for record in caplog.records] == [
        "tree attention: pallas_triton on CUDA, xla elsewhere",
        "tree attention: xla, since kernels decline (pallas_triton: head_dim 8 is not 32, 64, 128 or 256)",
        "tree attention: pallas_triton on CUDA, interpreted on CPU (slow: for tests)",
        "tree attention: xla, as asked",
    ]


@pytest.mark.parametrize(("backend", "kernels"), [("auto", 1), ("pallas", 1), ("xla", 0)])
def test_what_is_lowered_for_cuda_holds_the_kernel(backend, kernels):
    """On a machine without a GPU too: the choice is the lowering platform's, not this machine's."""
    attend = jax.jit(lambda args: tree_attention(**args, backend=backend))
    with warnings.catch_warnings(), compiling_for(CHIPS["h100"].name):
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        text = attend.trace(shaped()).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") == kernels
    assert "triton" not in attend.trace(shaped()).lower(lowering_platforms=("cpu",)).as_text()


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


def test_parents_give_the_mask_of_ancestors():
    """Random trees whose masks were built node by node; the parent is the last ancestor but oneself."""
    mask = tree_mask(np.random.default_rng(0), 2, 70)
    index = np.arange(70)
    parents = np.where(mask & (index[None, None] < index[None, :, None]), index, 0).max(-1).astype(np.int32)
    depth = int(mask.sum(-1).max()) - 1
    np.testing.assert_array_equal(unpack_mask(parents_mask(jnp.asarray(parents), depth), 70), mask)


@pytest.mark.parametrize("wrong", [{"block_rows": 48}, {"block_keys": 16}, {"num_warps": 3}, {"num_stages": 0}])
def test_a_tile_out_of_range_is_refused_by_name(wrong):
    [name] = wrong
    with pytest.raises(ValueError, match=f"{name} must be one of"):
        TileConfig(**{"block_rows": 16, "block_keys": 32, "num_warps": 4, "num_stages": 2, **wrong})


@pytest.mark.parametrize("chip", CHIPS)
def test_shipped_tiles_fit_a_program_and_splits_fill_the_gpu(chip):
    """Shared memory suffices; a prefix is split where programs are few, never into less than a tile."""
    for rows in (1, 16, 64, 1028, 8192):
        for head_dim in (32, 64, 128, 256):
            for dtype in (jnp.bfloat16, jnp.float32):
                config = tile_config(rows, head_dim, dtype, CHIPS[chip])
                assert shared_bytes(config, head_dim, dtype) <= CHIPS[chip].shared_per_block
    config = tile_config(4, 128, jnp.bfloat16, CHIPS[chip])
    assert 8 * prefix_splits(8, 32_768, config, CHIPS[chip]) >= CHIPS[chip].cores
    assert prefix_splits(10_000, 32_768, config, CHIPS[chip]) == 1
    assert prefix_splits(8, 0, config, CHIPS[chip]) == 1
    assert prefix_splits(8, 3 * config.block_keys, config, CHIPS[chip]) <= 3
