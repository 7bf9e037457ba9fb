"""The decode loop gives the target's own text, whatever is drafted, and keeps exact caches (pitfalls: the decode loop).

Programs are keyed by batch, capacity and LoopSpec and take seconds to compile, so tests share a few of them and
vary what is data: prompts, caps, drafts, seeds. Prefill depends on no tree and serves every tree of its batch.
"""

import contextlib
import dataclasses
import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # wherever pytest starts, and installed or not

from drafts import ANTI, MIX, MODES, OFFSPINE, ORACLE, injected, tiny_target

from jetspec_jax.cache import KVCache
from jetspec_jax.config import HeadConfig
from jetspec_jax.decode import LoopSpec, NoDrafter, decode, prefill
from jetspec_jax.head import DraftHead
from jetspec_jax.rope import rope_at
from jetspec_jax.sampling import Sampling
from jetspec_jax.tree import TreeShape, ancestors, build_tree
from kernels.pallas.tree_attention import causal_mask, pack_mask

VOCAB, CAPACITY, CHUNK = 64, 96, 16
PROMPTS = (1, 2, 3, 5, 8, 11, 13, 15, 16, 17, 19, 22, 25, 28, 31, 32, 33, 36, 38, 40)
EOS = (16, 26)  # of the 20 texts, some end at once, some early, some late, some never
GREEDY = Sampling()
PLAIN = LoopSpec(TreeShape(0, 1, 0), EOS, GREEDY.mode)
MAIN = TreeShape(16, 8, 7)
# Every budget, width and batch; each entry is one program.
TREES = [
    (TreeShape(1, 1, 1), 1),
    (TreeShape(2, 2, 3), 2),
    (TreeShape(7, 1, 15), 3),
    (MAIN, 5),
    (TreeShape(63, 2, 15), 4),
    (TreeShape(256, 8, 15), 2),
]


@pytest.fixture(autouse=True, scope="module")
def _compile_quickly():
    """These tests spend their time compiling; programs optimised less mean the same and compile twice as fast."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def target():
    return tiny_target(0)


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


@contextlib.contextmanager
def compilations():
    """A list that grows by one per backend compilation inside the block."""
    found, active = [], [True]

    def listen(event, duration, **_):
        if active[0] and event.endswith("backend_compile_duration"):
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        active[0] = False


def random_batch(draw, size):
    """A batch with ragged prompts, caps around block edges and eos, any drafts, and sometimes a padding row."""
    rows = draw(st.lists(st.none() | st.integers(0, len(PROMPTS) - 1), min_size=size, max_size=size))
    edges = (1, 2, 3, 4, 7, 8, 9, 10, 15, 16, 17, 18, 25, 33, 34, CAPACITY)
    caps = []
    for row in rows:
        end = None if row is None else first_eos(row)
        near = [] if end is None else [max(end - 1, 1), end, end + 1]
        caps.append(draw(st.sampled_from([*near, *edges])))
    modes = draw(st.lists(st.sampled_from(MODES), min_size=size, max_size=size))
    seeds = draw(st.lists(st.integers(0, 2**32 - 1), min_size=size, max_size=size))
    decoys = draw(st.lists(st.sampled_from((-1, *EOS, 5)), min_size=size, max_size=size))
    return Batch.of(rows, caps, modes, seeds, decoys)


# The text.


def test_the_texts_under_test_cover_every_kind_of_end():
    ends = [first_eos(row) for row in range(len(PROMPTS))]
    assert 1 in ends
    assert None in ends
    assert sum(x is not None and 2 <= x <= 30 for x in ends) >= 10
    assert {int(texts()[r, PROMPTS[r] + e - 1]) for r, e in enumerate(ends) if e} == set(EOS)


def test_plain_decoding_equals_a_cache_free_loop():
    """One token at a time with the cache, and the whole text anew for every token, agree on all texts."""
    for start in range(0, len(PROMPTS), 5):
        batch = Batch.of(range(start, start + 5), CAPACITY, drafter=NoDrafter())
        state = batch.advance(batch.prefill(), tree=PLAIN.tree)
        batch.check(state)
        for b in range(5):
            assert committed(state, b) == [1] * (len(new_tokens(batch, state)[b]) - 1)


@pytest.mark.parametrize(("tree", "size"), TREES, ids=[f"{t.budget}x{t.width}-batch{n}" for t, n in TREES])
def test_any_draft_gives_the_targets_own_greedy_text(tree, size):
    """Whatever is drafted, and whatever ends the rows, the text is that of the cache-free loop."""

    @settings(deadline=None, max_examples=10, derandomize=True, database=None)
    @given(st.data())
    def check(data):
        batch = random_batch(data.draw, size)
        batch.check(batch.run(tree))

    check()


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_every_text(mode):
    for start in range(0, len(PROMPTS), 5):
        batch = Batch.of(range(start, start + 5), CAPACITY, mode, seeds=range(5))
        batch.check(batch.run())


def test_oracle_drafts_commit_whole_blocks():
    """A true first choice at every depth is accepted at every depth, until a stop."""
    for tree, size in TREES:
        block = min(tree.depth, tree.budget) + 1
        batch = Batch.of([1, 10, 3, 11, 9][:size], CAPACITY, ORACLE, seeds=range(size))
        state = batch.run(tree)
        for b, new in enumerate(new_tokens(batch, state)):
            *whole, last = committed(state, b)
            assert whole == [block] * len(whole)
            assert 1 <= last <= block
            assert sum(whole) + last == len(new) - 1


def test_wrong_drafts_commit_one_token_a_round():
    for tree, size in TREES:
        batch = Batch.of(range(size), 24, ANTI, seeds=range(size))
        state = batch.run(tree)
        for b, new in enumerate(new_tokens(batch, state)):
            assert committed(state, b) == [1] * (len(new) - 1)
            assert not np.any(state.drafted[b])


def test_off_spine_drafts_are_accepted_through_lesser_siblings():
    """A full tree of width 2 and depth 5 holds every path, so the true one is accepted though it is never rank 1."""
    batch = Batch.of([1, 3, 4, 5], CAPACITY, OFFSPINE, seeds=range(4))
    state = batch.prefill()
    scorer = batch.drafter.scorer(target(), state.context, anchors_of(state), state.lengths, 2)
    first = np.array(scorer(1, jnp.zeros((4, 1), jnp.int32)).tokens)[:, 0]
    truth = texts()[[1, 3, 4, 5], batch.lengths + 1]
    assert np.array_equal(first[:, 1], truth)
    state = batch.run(TreeShape(63, 2, 15))
    lengths = [n for b in range(4) for n in committed(state, b)[:-1]]
    assert min(lengths) >= 2
    assert max(lengths) >= 5


def test_drafted_flags_tell_accepted_tokens_from_the_targets():
    """In a block every token but the last was drafted; the prompt and the first new token were not."""
    batch = Batch.of([1, 3, 4, 10, 11], 60, [ORACLE, OFFSPINE, MIX, MIX, ANTI], seeds=range(5))
    state = batch.run()
    for b, new in enumerate(new_tokens(batch, state)):
        start, rounds = batch.lengths[b], np.array(state.token_rounds)[b]
        assert not rounds[: start + 1].any()
        assert not rounds[start + len(new) :].any()
        for taken in range(1, int(state.rounds[b])):
            (places,) = np.nonzero(rounds == taken)
            assert np.array_equal(np.diff(places), np.ones(len(places) - 1))
            assert np.array(state.drafted)[b, places].tolist() == [True] * (len(places) - 1) + [False]


# Stops.


def test_eos_inside_an_accepted_block_ends_the_row_there():
    """Nothing after the eos is committed, counted or kept, though the draft went on and was right."""
    inside = [r for r in range(len(PROMPTS)) if first_eos(r) and first_eos(r) > 1 and (first_eos(r) - 1) % 8]
    batch = Batch.of(inside[:5], CAPACITY, ORACLE)
    state = batch.run()
    batch.check(state)
    for b, (row, new) in enumerate(zip(batch.rows, new_tokens(batch, state), strict=True)):
        assert new[-1] in EOS
        assert len(new) == first_eos(row)
        assert sum(committed(state, b)) == len(new) - 1
        assert state.lengths[b] == PROMPTS[row] + len(new) - 1


def test_a_first_token_that_is_eos_ends_the_row_before_any_round():
    row = next(r for r in range(len(PROMPTS)) if first_eos(r) == 1)
    batch = Batch.of([row, 1, row, 2, row], CAPACITY, ORACLE)
    state = batch.run()
    batch.check(state)
    assert np.array(state.rounds)[[0, 2, 4]].tolist() == [0, 0, 0]


@pytest.mark.parametrize("decoy", EOS)
def test_a_rejected_drafted_eos_ends_nothing(decoy):
    """An eos is drafted at every depth of every round; only the target's own ends a row."""
    for rows in ([1, 2, 3, 4, 5], [9, 10, 11, 12, 13]):
        batch = Batch.of(rows, CAPACITY, [ORACLE, OFFSPINE, ANTI, MIX, MIX], seeds=range(5), decoys=decoy)
        state = batch.prefill()
        anchors = anchors_of(state)
        scorer = batch.drafter.scorer(target(), state.context, anchors, state.lengths, MAIN.width)
        truth = texts()[np.array(rows)[:, None], batch.lengths[:, None] + np.arange(1, 8)]
        drafted = [np.any(np.array(scorer(d, anchors[:, None]).tokens) == decoy, axis=(1, 2)) for d in range(1, 8)]
        assert np.all(np.stack(drafted, axis=1) | (truth == decoy))
        batch.check(batch.advance(state))


def test_caps_at_every_place_of_a_block_are_exact():
    """Caps of 1 to 20 tokens, blocks of 8: before, at and after each edge, exactly as many tokens come out."""
    row = PROMPTS.index(5)  # no eos in its first tokens
    for start in range(1, 21, 5):
        for mode in (ORACLE, MIX):
            batch = Batch.of([row] * 5, range(start, start + 5), mode, seeds=range(5))
            state = batch.run()
            batch.check(state)
            if first_eos(row) is None:
                assert [len(x) for x in new_tokens(batch, state)] == list(range(start, start + 5))


def test_an_eos_at_or_before_the_cap_wins_and_one_after_it_is_never_seen():
    for row in (r for r in range(len(PROMPTS)) if (first_eos(r) or 0) > 3):
        end = first_eos(row)
        batch = Batch.of([row] * 5, [end - 2, end - 1, end, end + 1, end + 9], ORACLE)
        state = batch.run()
        batch.check(state)
        new = new_tokens(batch, state)
        assert [len(x) for x in new] == [end - 2, end - 1, end, end, end]
        assert [x[-1] in EOS for x in new] == [False, False, True, True, True]


# Caches.


def assert_fresh(state):
    """Cache rows and features below each length equal those of one cache-free forward over the committed tokens."""
    _, rows, taps = forward(target(), state.tokens)
    below = np.arange(CAPACITY) < np.array(state.lengths)[:, None]
    have = jax.tree.leaves((state.cache, state.context))
    for old, new in zip(have, jax.tree.leaves((rows, taps)), strict=True):
        np.testing.assert_allclose(np.array(by_token(old))[below], np.array(new)[below], atol=1e-4)


@pytest.mark.parametrize("rows", [[1, 6, 14, 19, None], [2, 10, 11, 16, 17]])
def test_after_every_round_caches_equal_a_fresh_prefill_and_nothing_else_is_read(rows):
    """Rows [0, length) of every layer and of the features are those of the committed tokens alone, after every round,
    though everything past the lengths is NaN and eos before it; the text is unchanged."""
    batch = Batch.of(rows, CAPACITY, [MIX, OFFSPINE, MIX, ORACLE, MIX], seeds=range(5))
    state = batch.prefill()
    assert_fresh(state)
    uneven = 0
    while not np.all(state.finished):
        before = np.array(state.lengths)
        state = batch.advance(poison(state), rounds=1)
        taken = np.array(state.lengths) - before
        uneven += len(set(taken[taken > 0])) > 1
        assert_fresh(state)
    batch.check(state)
    assert uneven > 2  # rows did accept different numbers of tokens in one round


def test_every_node_has_the_logits_of_a_chain_forward_of_its_path():
    """Verifying a tree behind the cache equals reading prompt and path as one plain text, node by node."""
    batch = Batch.of([1, 6, 8, 13, 19], CAPACITY, [MIX, OFFSPINE, ANTI, MIX, OFFSPINE], seeds=range(5))
    state = poison(batch.prefill())

    @jax.jit
    def verify(target, drafter, state):
        anchors = anchors_of(state)
        tree = build_tree(anchors, drafter.scorer(target, state.context, anchors, state.lengths, MAIN.width), MAIN)
        seen = ancestors(tree, MAIN.depth)
        positions = state.lengths[:, None] + tree.depths
        out = target(tree.tokens, positions, state.cache, state.lengths, pack_mask(seen))
        return tree, target.logits(out.hidden)

    tree, logits = jax.device_get(verify(target(), batch.drafter, state))
    assert tree.depths.max() >= 3
    for node in range(MAIN.nodes):
        chain, ends = np.array(state.tokens), np.array(state.lengths) + tree.depths[:, node]
        for b in range(5):
            at = node
            for place in range(ends[b], int(state.lengths[b]) - 1, -1):
                chain[b, place], at = tree.tokens[b, at], tree.parents[b, at]
        want = np.array(forward(target(), jnp.asarray(chain))[0])[np.arange(5), ends]
        np.testing.assert_allclose(logits[:, node], want, atol=1e-3)  # logits reach 30


def test_rows_do_not_depend_on_their_batch():
    """Permuted, next to noise or alone, a row has the same tokens and rounds."""
    rows, caps = np.array([1, 5, 10, 13, 19]), np.array([70, 9, 40, 33, 56])
    modes, seeds = np.array([MIX, OFFSPINE, ORACLE, MIX, ANTI]), np.arange(5)
    batch = Batch.of(rows, caps, modes, seeds)
    state = batch.run()
    rounds, new = np.array(state.rounds), new_tokens(batch, state)

    order = [3, 0, 4, 2, 1]
    other = Batch.of(rows[order], caps[order], modes[order], seeds[order])
    state = other.run()
    assert np.array_equal(state.rounds, rounds[order])
    assert new_tokens(other, state) == [new[i] for i in order]

    noisy = Batch.of(rows, caps, modes, seeds)
    noisy.tokens[2], noisy.lengths[2] = np.random.default_rng(5).integers(0, VOCAB, CAPACITY), 29
    state = noisy.run()
    for b in (0, 1, 3, 4):
        assert state.rounds[b] == rounds[b]
        assert new_tokens(noisy, state)[b] == new[b]

    for b in range(5):
        alone = Batch.of(rows[b : b + 1], caps[b : b + 1], modes[b : b + 1], seeds[b : b + 1])
        state = alone.run()
        assert state.rounds[0] == rounds[b]
        assert new_tokens(alone, state) == [new[b]]


def test_finished_and_padding_rows_stay_as_they_are():
    """While others go on, a finished row changes in no token, count or cache row, not even a spare one."""
    batch = Batch.of([1, 10, None, 14, 19], [60, 1, 50, 9, 30], [ANTI, MIX, MIX, ORACLE, MIX], seeds=range(5))
    state = poison(batch.prefill())
    assert state.finished[2]
    frozen = {}
    while not np.all(state.finished):
        for b in np.nonzero(np.array(state.finished))[0]:
            frozen.setdefault(int(b), row_of(state, b))
        state = batch.advance(state, rounds=1)
        assert all(same(row_of(state, b), kept) for b, kept in frozen.items())
    assert set(frozen) == {1, 2, 3, 4}
    assert state.rounds[2] == 0
    assert state.lengths[2] == 0
    batch.check(state)


def test_a_finished_batch_takes_no_rounds():
    batch = Batch.of([1, 10, None, 14, 19], 20, ORACLE)
    state = poison(batch.run())
    kept = [row_of(state, b) for b in range(5)]
    state = batch.advance(state)
    assert all(same(row_of(state, b), kept[b]) for b in range(5))


def test_blocks_that_reach_past_the_capacity_disturb_nothing():
    """Rows that may fill the capacity to its last token do so; drafts beyond it are dropped, not shifted."""
    endless = [r for r in range(len(PROMPTS)) if first_eos(r) is None][:2]
    rows = [endless[0], endless[1], endless[0], 13, endless[1]]
    batch = Batch.of(rows, CAPACITY, [ORACLE, OFFSPINE, MIX, ANTI, ANTI], seeds=range(5))
    assert batch.limits.max() == CAPACITY
    state = batch.prefill()
    while not np.all(state.finished):
        state = batch.advance(poison(state), rounds=1)
        assert_fresh(state)
    batch.check(state)
    assert [int(state.lengths[b]) for b in (0, 1, 2, 4)] == [CAPACITY - 1] * 4


@pytest.mark.parametrize("rounds", [1, 3, 1000])
def test_rounds_per_call_do_not_change_the_text(rounds):
    batch = Batch.of([1, 5, 10, None, 19], [70, 9, 40, 5, 56], MIX, seeds=range(5))
    state, calls = batch.prefill(), 0
    while not np.all(state.finished):
        before, live = np.array(state.rounds), ~np.array(state.finished)
        state, calls = batch.advance(state, rounds), calls + 1
        taken = np.array(state.rounds) - before
        assert taken.max() <= rounds
        assert np.all(taken[~live] == 0)
    batch.check(state)
    assert calls == -(-int(np.max(state.rounds)) // rounds)


def test_prefill_chunks_do_not_change_the_text_or_the_caches():
    """Prompts of chunk - 1, chunk, chunk + 1 tokens, read 16 or 32 at a time, and one read beside a longer one."""
    for lengths in ((15, 16, 17, 31, 32), (33, 16, 15, 1, 17)):
        rows = [PROMPTS.index(n) for n in lengths]
        for chunk in (16, 32):
            batch = Batch.of(rows, CAPACITY, MIX, seeds=range(5))
            state = batch.prefill(chunk)
            assert np.array_equal(state.lengths, lengths)
            assert_fresh(state)
            batch.check(batch.advance(poison(state)))


# The real head.


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
def fresh_head(head, target, tokens, lengths):
    """The head over the whole prefix, with no cache: context rows, and log-probabilities of every drafted slot."""
    batch, capacity = tokens.shape
    taps = forward(target, tokens)[2]
    positions = jnp.broadcast_to(jnp.arange(capacity, dtype=jnp.int32)[None], tokens.shape)
    rows = head.context_rows(taps, rope_at(positions, head.config))
    slots = head.depth + 1
    block = jnp.tri(slots, dtype=bool) if head.config.causal_head else jnp.ones((slots, slots), bool)
    before = jnp.broadcast_to((jnp.arange(capacity)[None] < lengths[:, None])[:, None], (batch, slots, capacity))
    visible = jnp.concatenate([before, jnp.broadcast_to(block[None], (batch, slots, slots))], axis=2)

    def dense(context):
        def attend(query, key, value):
            groups = query.shape[2] // key.shape[2]
            keys = jnp.repeat(jnp.concatenate([context.key, key], 1), groups, axis=2)
            values = jnp.repeat(jnp.concatenate([context.value, value], 1), groups, axis=2)
            scores = jnp.einsum("bnhd,bmhd->bhnm", query, keys) * query.shape[-1] ** -0.5
            weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -1e30), axis=-1)
            return jnp.einsum("bhnm,bmhd->bnhd", weights, values)

        return attend

    anchors = jnp.take_along_axis(tokens, lengths[:, None], axis=1)[:, 0]
    angles = rope_at(lengths[:, None] + jnp.arange(slots, dtype=jnp.int32)[None], head.config)
    hidden = head.run(target.embed(head.block_tokens(anchors)), angles, [dense(x) for x in rows])
    return rows, jax.nn.log_softmax(target.logits(hidden[:, 1:]))


def test_the_heads_context_and_drafts_equal_those_of_a_fresh_pass_over_the_prefix():
    """At every round, the first included, context rows and drafted log-probabilities are those of the head reading
    all committed tokens anew; the text is the target's own."""
    batch = Batch.of([1, 6, 10, 14, 19], [9, 12, 14, 10, 14], drafter=head())
    state = batch.prefill()

    @jax.jit
    def drafted(head, target, state):
        anchors = anchors_of(state)
        scorer = head.scorer(target, state.context, anchors, state.lengths, MAIN.width)
        children = [scorer(d, anchors[:, None]) for d in range(1, MAIN.depth + 1)]
        return tuple(jnp.concatenate(x, axis=1) for x in zip(*children, strict=True))

    while True:
        rows, want = jax.device_get(fresh_head(head(), target(), state.tokens, state.lengths))
        below = np.arange(CAPACITY) < np.array(state.lengths)[:, None]
        for have, new in zip(jax.tree.leaves(state.context), jax.tree.leaves(rows), strict=True):
            np.testing.assert_allclose(np.array(by_token(have))[below], new[below], atol=1e-4)
        state = poison(state)
        tokens, logprobs = jax.device_get(drafted(head(), target(), state))
        np.testing.assert_allclose(logprobs, np.take_along_axis(want, tokens, axis=2), atol=1e-3)
        np.testing.assert_allclose(logprobs, -np.sort(-want, axis=2)[..., : MAIN.width], atol=1e-3)
        if np.all(state.finished):
            break
        state = batch.advance(state, rounds=1)
    batch.check(state)


@pytest.mark.parametrize("causal", [True, False])
def test_a_slot_reaches_earlier_slots_only_in_a_bidirectional_head(causal):
    """Perturbing slot j's input changes no earlier slot of a causal head, in not one bit, and j itself and every
    slot of a bidirectional one; with an empty context too."""
    run = jax.jit(lambda head, x, context, lengths: head(x, context, lengths))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 8, 32)).astype(np.float32)
    lengths = jnp.asarray([0, 9], jnp.int32)
    context = head(causal).new_context(2, 16, jnp.float32)
    taps = jnp.asarray(rng.normal(size=(2, 9, 64)), jnp.float32)
    context = head(causal).extend_context(context, taps, jnp.zeros((2,), jnp.int32), lengths)
    base = np.array(run(head(causal), x, context, lengths))
    for slot in range(8):
        moved = x.copy()
        moved[:, slot] += rng.normal(size=32)
        changed = np.any(np.array(run(head(causal), moved, context, lengths)) != base, axis=2)
        assert changed[:, slot:].all()
        assert np.all(changed[:, :slot] != causal)


# Compilation and memory.


def test_nothing_is_compiled_once_warm():
    """Prompt lengths, who shares the batch, caps, drafts, seeds, rounds and temperature are all data."""
    hot = Sampling(temperature=0.7)

    def run(rows, caps, modes, seeds, temperature, rounds):
        batch = Batch.of(rows, caps, modes, seeds)
        sampling = Sampling(temperature=temperature)
        batch.advance(batch.prefill(), rounds).lengths.block_until_ready()
        state = batch.prefill(seeds=seeds, sampling=sampling)
        batch.advance(state, rounds, sampling=sampling).lengths.block_until_ready()

    run([0, 1, 2, 3, 4], 20, ORACLE, range(5), hot.temperature, 1000)
    with compilations() as found:
        run([19, None, 14, 9, 1], [3, 5, 70, 1, 9], MIX, range(5, 10), 1.3, 2)
        run([None, None, None, 9, 9], 11, ANTI, 3, 0.2, 7)
    assert found == []
    with compilations() as found:  # the count does count
        jax.jit(lambda x: x * 3)(jnp.ones((3,))).block_until_ready()
    assert len(found) >= 1


def test_decoding_updates_its_caches_in_place():
    """The program's outputs alias the caches, and its temporaries are far below their size and do not grow with it."""
    temporaries = []
    for capacity in (4096, 16384):
        ints = jax.ShapeDtypeStruct((2,), jnp.int32)
        tokens, seeds = jax.ShapeDtypeStruct((2, capacity), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.uint32)
        start = functools.partial(prefill, eos_ids=EOS, mode=GREEDY.mode, chunk=CHUNK)
        state = jax.eval_shape(start, target(), head(), tokens, ints, ints, seeds, GREEDY.knobs)
        caches = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state.cache, state.context)))
        rounds, spec = jax.ShapeDtypeStruct((), jnp.int32), LoopSpec(MAIN, EOS, GREEDY.mode)
        lowered = decode.lower(target(), head(), state, rounds, GREEDY.knobs, spec=spec)
        memory = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes >= caches
        temporaries.append(memory.temp_size_in_bytes)
        assert memory.temp_size_in_bytes < caches / 4
    assert temporaries[1] <= temporaries[0] * 1.05
