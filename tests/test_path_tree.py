"""Trees of a head with a parent term: exactly the best paths when every child is scored given its own parent."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_case import CAPACITY, MAIN, PLAIN, VOCAB, Batch, committed, head, new_tokens
from drafts import MIX, OFFSPINE, ORACLE, InjectedDraft
from flax import nnx
from test_tree import BATCH, check_structure, log_softmax, oracle, path_of, rows_of

from jetspec_jax import path_tree
from jetspec_jax.decode import NoDrafter
from jetspec_jax.head import DraftHead
from jetspec_jax.path_tree import ParentTerm, PathScorer, best_tree, search_tree
from jetspec_jax.sampling import Sampling
from jetspec_jax.tree import TreeShape, slot_scorer

pytestmark = pytest.mark.usefixtures("compile_quickly")


def parent_term(embed, unembed):
    term = ParentTerm(*embed.shape, rngs=nnx.Rngs(0), dtype=jnp.float32)
    term.embed.weight[...] = jnp.asarray(embed, jnp.float32)
    term.unembed.weight[...] = jnp.asarray(unembed, jnp.float32)
    return term


@functools.partial(jax.jit, static_argnames="shape")
def searched(anchors, base, term, shape):
    return search_tree(anchors, PathScorer(base, term, shape.width), shape)


def conditioned(base, term):
    """Log-probabilities `[B, depth, parent, vocab]` of every child under every parent."""
    added = np.asarray(term.embed.weight[...]) @ np.asarray(term.unembed.weight[...]).T
    return log_softmax(base[:, :, None] + added[None, None])


def random_case(seed, depth, vocab, rank=3):
    """Base logits of every sharpness, and a term as large as they are."""
    rng = np.random.default_rng(seed)
    sharpness = rng.choice([0.1, 1.0, 3.0, 10.0], (BATCH, depth, 1))
    base = (rng.normal(0, 1, (BATCH, depth, vocab)) * sharpness).astype(np.float32)
    term = parent_term(rng.normal(0, 1, (vocab, rank)), rng.normal(0, 2, (vocab, rank)))
    return rng.integers(0, vocab, BATCH).astype(np.int32), base, term


@pytest.mark.parametrize(("budget", "width", "depth"), [(1, 3, 5), (7, 3, 5), (16, 6, 4), (63, 2, 7), (256, 3, 5)])
def test_the_tree_is_exactly_the_best_paths_with_every_child_given_its_own_parent(budget, width, depth):
    """Against the enumeration of all paths; a path of the one that the other lacks would have to tie with its last."""
    shape = TreeShape(budget, width, depth)
    anchors, base, term = random_case(budget, depth, vocab=6)
    tables = conditioned(base, term)
    for anchor, table, tree in zip(anchors, tables, rows_of(searched(anchors, base, term, shape)), strict=True):
        check_structure(tree, anchor, shape)
        expected = dict(oracle(anchor, table, shape))
        got = {path_of(tree, node): tree.scores[node] for node in range(1, len(tree.tokens))}
        assert len(got) == shape.nodes - 1 == len(expected)
        assert all(abs(got[path] - expected[path]) < 1e-4 for path in got.keys() & expected.keys())
        last = min(expected.values())
        for path in got.keys() ^ expected.keys():
            assert abs({**got, **expected}[path] - last) < 1e-4


@pytest.mark.parametrize("budget", [2, 16, 63])
def test_ties_and_impossible_tokens_keep_a_best_closed_tree_that_no_other_row_changes(budget, monkeypatch):
    """Integer log-probabilities (0 included), some of probability 0: many exact ties."""
    shape = TreeShape(budget, width=4, depth=4)
    rng = np.random.default_rng(budget)
    anchors = rng.integers(0, 5, BATCH).astype(np.int32)
    tables = -rng.integers(0, 3, (BATCH, 4, 5, 5)).astype(np.float32)
    tables[rng.random(tables.shape) < 0.3] = -np.inf
    monkeypatch.setattr(PathScorer, "rows", table_rows)
    search = jax.jit(lambda a, t: search_tree(a, TableScorer(t[:, :, 0], None, 4, t), shape))
    built = search(anchors, tables)
    order = rng.permutation(BATCH)
    again = search(anchors[order], tables[order])
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x)[order], np.asarray(y)), built, again)
    for anchor, table, tree in zip(anchors, tables, rows_of(built), strict=True):
        check_structure(tree, anchor, shape)
        assert np.isfinite(tree.scores).all()
        scores = [score for _, score in oracle(anchor, table, shape)]
        np.testing.assert_array_equal(np.sort(tree.scores[1:])[::-1], scores)


@dataclasses.dataclass(frozen=True)
class TableScorer(PathScorer):
    """Rows looked up in `[B, depth, parent, vocab]`."""

    table: jax.Array


def table_rows(self, depths, tokens):
    found = self.table[jnp.arange(depths.shape[0])[:, None], depths, tokens]
    logprobs, children = jax.lax.top_k(found, self.width)
    return path_tree.Children(children, logprobs)


def test_width_one_is_the_chain_that_follows_the_term_greedily():
    """Each token is the argmax of its slot's logits given the token before it."""
    shape = TreeShape(budget=7, width=1, depth=7)
    anchors, base, term = random_case(2, shape.depth, vocab=9)
    added = np.asarray(term.embed.weight[...]) @ np.asarray(term.unembed.weight[...]).T
    for anchor, logits, tree in zip(anchors, base, rows_of(searched(anchors, base, term, shape)), strict=True):
        token = anchor
        for depth in range(7):
            token = (logits[depth] + added[token]).argmax()
            assert tree.tokens[depth + 1] == token
        np.testing.assert_array_equal(tree.parents, [0, *range(7)])


def test_a_term_of_zero_gives_the_tree_of_the_slots_alone():
    """Also the same nodes in the same places, where no scores tie."""
    shape = TreeShape(budget=16, width=4, depth=5)
    anchors, base, term = random_case(3, shape.depth, vocab=9)
    term = jax.tree.map(jnp.zeros_like, term)
    have = searched(anchors, base, term, shape)
    want = jax.jit(lambda a, x: best_tree(a, slot_scorer(x, shape.width), shape))(anchors, base)
    np.testing.assert_allclose(have.scores, want.scores, atol=1e-5)
    same = np.all(np.asarray(have.tokens) == want.tokens, axis=1) & np.all(have.parents == want.parents, axis=1)
    assert same.mean() > 0.9  # in the rest, sums of equal numbers tie up to rounding


def test_rows_are_computed_once_for_a_depth_and_token_and_only_for_the_best_nodes():
    """Peaked slots, where branches rejoin the best path: as many rows as the tree has different (depth, token), those
    of the last depth aside, and few more; not one for every node."""
    shape, vocab = TreeShape(63, 4, 15), 32
    rng = np.random.default_rng(0)
    base = rng.normal(0, 1, (1, shape.depth, vocab)).astype(np.float32)
    np.put_along_axis(base, rng.integers(0, vocab, (1, shape.depth, 1)), 8.0, axis=2)
    term = parent_term(rng.normal(0, 0.3, (vocab, 3)), rng.normal(0, 0.3, (vocab, 3)))
    asked = []

    class Counting(PathScorer):
        def rows(self, depths, tokens):
            jax.debug.callback(lambda d, t: asked.extend(zip(d[0].tolist(), t[0].tolist())), depths, tokens)
            return super().rows(depths, tokens)

    tree = jax.jit(lambda a, b: search_tree(a, Counting(b, term, shape.width), shape))(jnp.int32([5]), base)
    jax.effects_barrier()
    inner = np.asarray(tree.depths)[0] < shape.depth
    needed = {(int(d), int(t)) for d, t in zip(tree.depths[0][inner], tree.tokens[0][inner], strict=True)}
    computed = [row for row in asked if row != (0, 0)]  # what is asked for in place of nothing
    assert needed <= set(computed)
    assert len(computed) == len(set(computed)) <= 2 * len(needed)
    assert len(computed) < inner.sum()


@pytest.mark.parametrize("slot", [np.nan, np.inf, -np.inf], ids=["nan", "inf", "-inf"])
def test_a_slot_without_numbers_ends_in_a_whole_tree_and_changes_no_other_row(slot):
    """A head may overflow: the search must end, and a node must never stand for nothing."""
    shape = TreeShape(budget=40, width=3, depth=4)
    anchors, base, term = random_case(5, shape.depth, vocab=9)
    want = rows_of(searched(anchors, base, term, shape))
    base[0, 1], base[1, 2, 4], base[2] = slot, slot, slot
    have = rows_of(searched(anchors, base, term, shape))
    for anchor, tree in zip(anchors, have, strict=True):
        check_structure(tree, anchor, shape)
        assert np.isfinite(tree.scores).all()
    jax.tree.map(np.testing.assert_array_equal, have[3:], want[3:])


def test_a_budget_far_above_what_width_and_depth_allow_takes_every_path():
    anchors, base, term = random_case(6, 1, vocab=9)
    assert searched(anchors, base, term, TreeShape(256, 2, 1)).tokens.shape == (BATCH, 3)


def test_a_tree_deeper_than_the_slots_is_refused():
    anchors, base, term = random_case(0, 3, vocab=6)
    with pytest.raises(ValueError, match="depth 4 is beyond the 3 drafted slots"):
        search_tree(anchors, PathScorer(base, term, 2), TreeShape(8, 2, 4))


# In the decode loop.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ConditionedDraft:
    """Injected drafts, which are often right, disturbed by a term of the parent."""

    draft: InjectedDraft
    term: ParentTerm

    def scorer(self, target, context, anchors, lengths, width):
        return PathScorer(self.draft.logits(target.config.vocab_size, lengths, width), self.term, width)

    def __getattr__(self, name):
        return getattr(self.draft, name)


def conditioned_batch(rows, size):
    """Rows of texts with such drafts; the term is as large as the logits."""
    rng = np.random.default_rng(size)
    batch = Batch.of(rows, CAPACITY, [ORACLE, MIX, MIX, OFFSPINE, ORACLE][:size], seeds=range(size))
    term = parent_term(rng.normal(0, 1, (VOCAB, 4)), rng.normal(0, 1, (VOCAB, 4)))
    return dataclasses.replace(batch, drafter=ConditionedDraft(batch.drafter, term))


@pytest.mark.parametrize(("tree", "size"), [(MAIN, 5), (TreeShape(256, 8, 15), 2)], ids=["16", "256"])
def test_conditioned_drafts_give_the_targets_own_greedy_text(tree, size):
    """Whatever the term does to the trees; some paths are accepted and some are not."""
    lengths = []
    for rows in ([1, 3, 4, 10, 11], [6, 8, 13, 14, 19]):
        batch = conditioned_batch(rows[:size], size)
        state = batch.run(tree)
        batch.check(state)
        lengths += [n for b in range(size) for n in committed(state, b)]
    assert min(lengths) == 1 and max(lengths) > 4


def test_conditioned_drafts_give_the_targets_own_sampled_text():
    """Token for token that of plain decoding with the same seeds."""
    sampling = Sampling(temperature=0.8, top_k=8)
    batch = conditioned_batch([1, 3, 4, 10, 11], 5)
    plain = Batch.of(batch.rows, CAPACITY, drafter=NoDrafter())
    have = batch.advance(batch.prefill(seeds=range(5), sampling=sampling), sampling=sampling)
    want = plain.advance(plain.prefill(seeds=range(5), sampling=sampling), tree=PLAIN.tree, sampling=sampling)
    assert new_tokens(batch, have) == new_tokens(plain, want)
    assert np.sum(have.rounds) < np.sum(want.rounds)


def test_a_head_with_a_large_random_term_gives_the_targets_own_text():
    """The real head, batched and with ragged prompts."""
    config = dataclasses.replace(head().config, parent_rank=8)
    large = DraftHead(config, rngs=nnx.Rngs(7))
    assert not np.any(large.parent.unembed.weight[...]), "a new term adds nothing"
    large.parent.unembed.weight[...] = 10 * jax.random.normal(jax.random.key(0), (VOCAB, 8))
    batch = Batch.of([1, 6, 10, 14, 19], [30, 40, 30, 20, 30], drafter=large)
    batch.check(batch.run())
