"""Texts that a tiny target writes, and batches of them to decode: what the tests of the decode loop share.

Programs are keyed by batch, capacity and LoopSpec and take seconds to compile, so tests share a few of them and
vary what is data: prompts, caps, drafts, seeds. Prefill depends on no tree and serves every tree of its batch.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from drafts import MIX, injected, tiny_target
from flax import nnx

from jetspec_jax.cache import KVCache
from jetspec_jax.config import HeadConfig
from jetspec_jax.decode import LoopSpec, decode, prefill
from jetspec_jax.head import DraftHead
from jetspec_jax.sampling import Sampling
from jetspec_jax.tree import TreeShape
from kernels.pallas.tree_attention import causal_mask

VOCAB, CAPACITY, CHUNK = 64, 96, 16
PROMPTS = (1, 2, 3, 5, 8, 11, 13, 15, 16, 17, 19, 22, 25, 28, 31, 32, 33, 36, 38, 40)
EOS = (16, 26)  # of the 20 texts, some end at once, some early, some late, some never
GREEDY = Sampling()
PLAIN = LoopSpec(TreeShape(0, 1, 0), EOS, GREEDY.mode)
MAIN = TreeShape(16, 8, 7)


@functools.cache
def target():
    return tiny_target(0)


@functools.cache
def head(causal=True):
    config = HeadConfig.from_hf(
        {
            **target().config.to_hf(),
            "architectures": ["DFlashDraftModel"],
            "num_hidden_layers": 2,
            "block_size": MAIN.depth + 1,
            "num_target_layers": 2,
            "dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 63, "causal_head": causal},
        }
    )
    return DraftHead(config, rngs=nnx.Rngs(7))


@jax.jit
def forward(target, tokens):
    """Logits, layer rows and taps of every position of `tokens`, with an empty cache."""
    batch, length = tokens.shape
    cache = KVCache.zeros(target.config, batch, 1, jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], tokens.shape)
    taps = tuple(range(target.config.num_hidden_layers))
    out = target(tokens, positions, cache, jnp.zeros((batch,), jnp.int32), causal_mask(length), taps)
    return target.logits(out.hidden), out.rows, out.taps


@functools.cache
def texts():
    """int32 `[20, CAPACITY]`: prompts of `PROMPTS` tokens and what a cache-free loop makes of them, eos ignored."""

    @jax.jit
    def loop(target, tokens, lengths):
        def step(i, tokens):
            chosen = jnp.argmax(forward(target, tokens)[0][:, i - 1], axis=-1).astype(jnp.int32)
            return tokens.at[:, i].set(jnp.where(i < lengths, tokens[:, i], chosen))

        return jax.lax.fori_loop(1, CAPACITY, step, tokens)

    noise = np.random.default_rng(0).integers(0, VOCAB, (len(PROMPTS), CAPACITY))
    return np.array(loop(target(), jnp.asarray(noise, jnp.int32), jnp.asarray(PROMPTS, jnp.int32)))


def first_eos(row):
    """How many new tokens text `row` has up to and with its first eos; None when it has none."""
    (places,) = np.nonzero(np.isin(texts()[row, PROMPTS[row] :], EOS))
    return int(places[0]) + 1 if places.size else None


def expected(row, cap):
    """The new tokens of text `row` under `cap`: up to the first eos, or the cap."""
    end = min(x for x in (first_eos(row), cap, CAPACITY - PROMPTS[row]) if x is not None)
    return texts()[row, PROMPTS[row] : PROMPTS[row] + end].tolist()


@dataclasses.dataclass
class Batch:
    """Rows of `texts` (None is padding), each under a cap, and their drafts."""

    rows: list
    caps: list
    drafter: object
    tokens: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, rows, caps, modes=MIX, seeds=0, decoys=-1, drafter=None):
        """A batch whose tokens past the prompts are noise."""
        picked = texts()[[0 if r is None else r for r in rows]]
        lengths = np.array([0 if r is None else PROMPTS[r] for r in rows], np.int32)
        noise = np.random.default_rng(1).integers(0, VOCAB, picked.shape).astype(np.int32)
        tokens = np.where(np.arange(CAPACITY) < lengths[:, None], picked, noise)
        drafter = drafter or injected(target(), picked, modes, seeds=seeds, decoys=decoys)
        return cls(list(rows), list(np.broadcast_to(caps, (len(rows),))), drafter, tokens, lengths)

    @property
    def limits(self):
        return np.minimum(self.lengths + np.array(self.caps), CAPACITY).astype(np.int32)

    def prefill(self, chunk=CHUNK, seeds=0, sampling=GREEDY):
        seeds = np.broadcast_to(np.asarray(seeds, np.uint32), self.lengths.shape)
        static = {"eos_ids": EOS, "mode": sampling.mode, "chunk": chunk}
        args = (self.tokens, self.lengths, self.limits, seeds)
        return prefill(target(), self.drafter, *map(jnp.asarray, args), sampling.knobs, **static)

    def advance(self, state, rounds=1000, tree=MAIN, sampling=GREEDY):
        spec = LoopSpec(tree, EOS, sampling.mode)
        return decode(target(), self.drafter, state, jnp.int32(rounds), sampling.knobs, spec=spec)

    def run(self, tree=MAIN):
        return self.advance(self.prefill(), tree=tree)

    def check(self, state):
        """Every row is finished, with its prompt and exactly the expected tokens."""
        assert np.all(state.finished)
        for got, row, cap in zip(new_tokens(self, state), self.rows, self.caps, strict=True):
            assert got == ([] if row is None else expected(row, cap))
        prompts = np.arange(CAPACITY) < self.lengths[:, None]
        assert np.array_equal(np.array(state.tokens)[prompts], self.tokens[prompts])


def new_tokens(batch, state):
    """Each row's committed tokens after its prompt."""
    tokens, ends = np.array(state.tokens), np.array(state.lengths) + 1
    return [[] if row is None else tokens[b, batch.lengths[b] : ends[b]].tolist() for b, row in enumerate(batch.rows)]


def anchors_of(state):
    """The last committed token of each row."""
    return jnp.take_along_axis(state.tokens, state.lengths[:, None], axis=1)[:, 0]


def committed(state, row):
    """How many tokens each round gave `row`, from round 1 on."""
    return np.bincount(np.array(state.token_rounds)[row], minlength=int(state.rounds[row]) + 1)[1:].tolist()


def by_token(x):
    """Caches `[B, K, L, D]` as `[B, L, K, D]` and back; features `[B, L, T * E]` as they are."""
    return x.swapaxes(1, 2) if x.ndim == 4 else x


@jax.jit
def poison(state):
    """NaN in every row of every cache and context at or past the length, eos in every token past the anchor."""

    def spare(x):
        tokens = by_token(x)
        past = jnp.arange(tokens.shape[1])[None] >= state.lengths[:, None]
        return by_token(jnp.where(past.reshape(*past.shape, *(1,) * (x.ndim - 2)), jnp.nan, tokens))

    tokens = jnp.where(jnp.arange(CAPACITY)[None] > state.lengths[:, None], EOS[0], state.tokens)
    cache, context = jax.tree.map(spare, (state.cache, state.context))
    return dataclasses.replace(state, tokens=tokens, cache=cache, context=context)


def row_of(state, row):
    """A copy of everything the state holds of one row."""
    state = dataclasses.replace(state, keys=jax.random.key_data(state.keys))
    return [np.array(x)[row] for x in jax.tree.leaves(state)]


def same(one, other):
    return all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(one, other, strict=True))
