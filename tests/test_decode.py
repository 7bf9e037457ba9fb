"""The decode loop gives the target's own text, whatever is drafted, and keeps exact caches."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_case import (
    CAPACITY,
    EOS,
    MAIN,
    PLAIN,
    PROMPTS,
    VOCAB,
    Batch,
    anchors_of,
    by_token,
    committed,
    first_eos,
    forward,
    new_tokens,
    poison,
    row_of,
    same,
    target,
    texts,
)
from drafts import ANTI, MIX, MODES, OFFSPINE, ORACLE
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec_jax.decode import NoDrafter
from jetspec_jax.sampling import Sampling
from jetspec_jax.tree import TreeShape, ancestors, build_tree
from kernels.pallas.tree_attention import pack_mask

pytestmark = pytest.mark.usefixtures("compile_quickly")

# Every budget, width and batch; each entry is one program.
TREES = [
    (TreeShape(1, 1, 1), 1),
    (TreeShape(2, 2, 3), 2),
    (TreeShape(7, 1, 15), 3),
    (MAIN, 5),
    (TreeShape(63, 2, 15), 4),
    (TreeShape(256, 8, 15), 2),
]


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
    row = next(r for r in range(len(PROMPTS)) if first_eos(r) is None)
    for start in range(1, 21, 5):
        for mode in (ORACLE, MIX):
            batch = Batch.of([row] * 5, range(start, start + 5), mode, seeds=range(5))
            state = batch.run()
            batch.check(state)
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


# Compilation.


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
