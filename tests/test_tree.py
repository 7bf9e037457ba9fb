"""The draft tree: exactly the best paths of the whole tree, its order and masks, and the walk of acceptance."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.accept import accept
from jetspec_jax.tree import Children, Tree, TreeShape, ancestors, build_tree, slot_scorer
from kernels.pallas.tree_attention import pack_mask, unpack_mask

BATCH = 48  # tables in one compiled call
TREES = 12  # trees in one compiled call, where numpy walks each
BUDGETS = (1, 2, 7, 16, 63, 256)
FLOOR = np.float32(-1e30)  # what a path of probability 0 scores


def parent_table(table, width):
    """A scorer whose children depend on the parent's token: log-probabilities `[B, depth, vocab, vocab]`."""
    logprobs, tokens = jax.lax.top_k(table, width)
    rows = jnp.arange(table.shape[0])[:, None]
    return lambda depth, parents: Children(tokens[rows, depth - 1, parents], logprobs[rows, depth - 1, parents])


@functools.partial(jax.jit, static_argnames=("shape",))
def best_tree(anchors, table, shape):
    return build_tree(anchors, parent_table(table, shape.width), shape)


def log_softmax(x):
    shifted = x - x.max(-1, keepdims=True)
    return (shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))).astype(np.float32)


def oracle(anchor, table, shape):
    """Every path of the full tree with its score, best first: the specification, by enumeration."""
    here, score, paths, scores = np.zeros((1, 0), int), np.zeros(1, np.float32), [], []
    for depth in range(shape.depth):
        rows = table[depth, here[:, -1] if depth else [anchor]]
        best = np.argsort(-rows, axis=1, kind="stable")[:, : shape.width]
        step = np.maximum(np.take_along_axis(rows, best, axis=1), FLOOR)
        score = np.maximum(score[:, None] + step, FLOOR).ravel()
        here = np.column_stack([np.repeat(here, shape.width, axis=0), best.ravel()])
        paths += map(tuple, here.tolist())
        scores += score.tolist()
    order = np.argsort(-np.array(scores, np.float32), kind="stable")  # ties go to the smaller depth
    return [(paths[i], scores[i]) for i in order[: shape.budget]]


def path_of(tree, node):
    tokens = []
    while node:
        tokens.append(int(tree.tokens[node]))
        node = int(tree.parents[node])
    return tuple(reversed(tokens))


def rows_of(tree):
    """The trees of a batch, one at a time, as numpy."""
    tree = jax.tree.map(np.asarray, tree)
    return [jax.tree.map(lambda x, b=b: x[b], tree) for b in range(tree.tokens.shape[0])]


def check_structure(tree, anchor, shape):
    """What every tree promises whatever the scores."""
    assert tree.tokens[0] == anchor
    assert (tree.parents[0], tree.depths[0], tree.scores[0]) == (0, 0, 0)
    nodes = np.arange(1, len(tree.tokens))
    assert (tree.parents[nodes] < nodes).all(), "parents come before children"
    assert (tree.depths[nodes] == tree.depths[tree.parents[nodes]] + 1).all(), "a child is one deeper than its parent"
    assert (np.diff(tree.depths) >= 0).all(), "depths ascend"
    assert tree.depths.max() <= shape.depth
    assert (tree.scores[nodes] <= tree.scores[tree.parents[nodes]]).all(), "scores descend along every path"
    siblings = list(zip(tree.parents[nodes].tolist(), tree.tokens[nodes].tolist(), strict=True))
    assert len(set(siblings)) == len(siblings), "siblings have distinct tokens"


def random_tables(seed, depth, vocab):
    """Distributions of every sharpness, from flat to nearly one-hot."""
    rng = np.random.default_rng(seed)
    sharpness = rng.choice([0.1, 1.0, 3.0, 10.0], (BATCH, depth, 1, 1))
    anchors = rng.integers(0, vocab, BATCH).astype(np.int32)
    return anchors, log_softmax(rng.normal(0, 1, (BATCH, depth, vocab, vocab)) * sharpness)


@pytest.mark.parametrize("budget", BUDGETS)
def test_tree_is_exactly_the_best_budget_paths_under_parent_dependent_scores(budget):
    """Random tables without ties: the same paths and scores as the enumeration of all of them."""
    shape = TreeShape(budget, width=3, depth=5)
    anchors, table = random_tables(budget, shape.depth, vocab=6)
    for anchor, rows, tree in zip(anchors, table, rows_of(best_tree(anchors, table, shape)), strict=True):
        check_structure(tree, anchor, shape)
        expected = dict(oracle(anchor, rows, shape))
        got = {path_of(tree, node): tree.scores[node] for node in range(1, len(tree.tokens))}
        assert got.keys() == expected.keys()
        assert all(got[path] == expected[path] for path in got)  # float32 sums in the same order: exactly


@pytest.mark.parametrize("budget", [2, 16, 256])
def test_ties_and_impossible_tokens_keep_a_best_closed_deterministic_tree(budget):
    """Integer log-probabilities (0 included) and -inf: the best scores, a valid tree, the same one every time."""
    shape = TreeShape(budget, width=4, depth=4)
    rng = np.random.default_rng(budget)
    anchors = rng.integers(0, 5, BATCH).astype(np.int32)
    table = -rng.integers(0, 3, (BATCH, 4, 5, 5)).astype(np.float32)
    table[rng.random(table.shape) < 0.3] = -np.inf
    built = best_tree(anchors, table, shape)
    order = rng.permutation(BATCH)
    again = best_tree(anchors[order], table[order], shape)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x)[order], np.asarray(y)), built, again)
    for anchor, rows, tree in zip(anchors, table, rows_of(built), strict=True):
        check_structure(tree, anchor, shape)
        assert np.isfinite(tree.scores).all()
        expected = oracle(anchor, rows, shape)
        np.testing.assert_array_equal(np.sort(tree.scores[1:])[::-1], [score for _, score in expected])


def test_ties_go_to_the_smaller_depth_then_the_better_parent_then_the_better_rank():
    """All tokens equally likely: the tree fills level by level, from the left."""
    table = np.full((1, 3, 4, 4), -1.0, np.float32)
    tree = rows_of(best_tree(np.int32([2]), table, TreeShape(5, width=2, depth=3)))[0]
    assert [path_of(tree, node) for node in range(1, 6)] == [(0,), (1,), (0, 0), (0, 1), (1, 0)]


def test_certain_tokens_never_leave_their_ancestors_out():
    """Log-probability 0 ties a child with its parent; the parent is still kept first."""
    table = np.full((1, 6, 3, 3), -np.inf, np.float32)
    table[:, :, :, 1] = 0
    tree = rows_of(best_tree(np.int32([0]), table, TreeShape(4, width=2, depth=6)))[0]
    assert [path_of(tree, node) for node in range(5)] == [(1,) * node for node in range(5)]
    np.testing.assert_array_equal(tree.scores, 0)


def test_budget_above_the_full_tree_gives_the_full_tree():
    """width + width^2 + ... + width^depth nodes, each once."""
    shape = TreeShape(budget=500, width=3, depth=3)
    assert shape.nodes == 1 + 3 + 9 + 27
    anchors, table = random_tables(1, shape.depth, vocab=4)
    for anchor, rows, tree in zip(anchors, table, rows_of(best_tree(anchors, table, shape)), strict=True):
        check_structure(tree, anchor, shape)
        assert {path_of(tree, n) for n in range(1, 40)} == {path for path, _ in oracle(anchor, rows, shape)}


def test_width_one_is_the_chain_of_best_tokens():
    """One child a node: the greedy draft."""
    shape = TreeShape(budget=7, width=1, depth=7)
    anchors, table = random_tables(2, shape.depth, vocab=5)
    for anchor, rows, tree in zip(anchors, table, rows_of(best_tree(anchors, table, shape)), strict=True):
        token = anchor
        for depth in range(7):
            token = rows[depth, token].argmax()
            assert tree.tokens[depth + 1] == token
        np.testing.assert_array_equal(tree.parents, [0, *range(7)])


def test_budget_zero_is_the_root_alone_and_asks_for_no_scores():
    """Plain decoding's tree."""
    shape = TreeShape(0, 1, 0)
    assert shape.nodes == 1
    tree = build_tree(jnp.int32([4, 5]), None, shape)
    np.testing.assert_array_equal(tree.tokens, [[4], [5]])


def test_slot_scorer_scores_log_softmax_of_its_slot_whatever_the_parent():
    """Row d - 1 of the logits is the distribution of depth d; logits of any dtype are scored in float32."""
    shape = TreeShape(budget=16, width=4, depth=4)
    rng = np.random.default_rng(3)
    logits = jnp.asarray(rng.normal(0, 2, (BATCH, 4, 9)), jnp.bfloat16)
    anchors = rng.integers(0, 9, BATCH).astype(np.int32)
    built = jax.jit(lambda a, x: build_tree(a, slot_scorer(x, shape.width), shape))(anchors, logits)
    table = log_softmax(np.asarray(logits, np.float32))
    for anchor, rows, tree in zip(anchors, table, rows_of(built), strict=True):
        check_structure(tree, anchor, shape)
        expected = oracle(anchor, np.broadcast_to(rows[:, None], (4, 9, 9)), shape)
        np.testing.assert_allclose(np.sort(tree.scores[1:])[::-1], [score for _, score in expected], atol=1e-5)


def test_slot_scorer_takes_the_whole_vocabulary_but_not_more():
    """`width` is at most the vocabulary: equal works, above it is an error and not a silent repeat."""
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 1, (1, 2, 4)), jnp.float32)
    children = slot_scorer(logits, 4)(1, jnp.zeros((1, 3), jnp.int32))
    assert children.tokens.shape == children.logprobs.shape == (1, 3, 4)
    assert sorted(np.asarray(children.tokens[0, 0])) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="top_k"):
        slot_scorer(logits, 5)


@pytest.mark.parametrize("slot", [np.nan, np.inf, -np.inf], ids=["nan", "inf", "-inf"])
def test_a_slot_without_numbers_ends_in_a_whole_tree_and_changes_no_other_row(slot):
    """A head may overflow: the root must stay the anchor, or the text would not be the target's."""
    shape = TreeShape(budget=40, width=3, depth=4)
    rng = np.random.default_rng(5)
    anchors = rng.integers(0, 9, 4).astype(np.int32)
    logits = rng.normal(0, 2, (4, shape.depth, 9)).astype(np.float32)
    build = jax.jit(lambda anchors, logits: build_tree(anchors, slot_scorer(logits, shape.width), shape))
    want = rows_of(build(anchors, logits))
    logits[0, 1], logits[1, 2, 4], logits[2] = slot, slot, slot
    have = rows_of(build(anchors, logits))
    for anchor, tree in zip(anchors, have, strict=True):
        check_structure(tree, anchor, shape)
        assert np.isfinite(tree.scores).all()
    jax.tree.map(np.testing.assert_array_equal, have[3], want[3])


def random_parents(rng, nodes, depth):
    """Parents and depths of a random tree in which depths ascend."""
    parents, depths = np.zeros(nodes, np.int32), np.zeros(nodes, np.int32)
    for node in range(1, nodes):
        free = [p for p in range(node) if depths[p] < depth and depths[p] + 1 >= depths[node - 1]]
        parents[node] = rng.choice(free or [parents[node - 1]])
        depths[node] = depths[parents[node]] + 1
    return parents, depths


def random_trees(seed, nodes, depth, vocab):
    """A batch of trees whose siblings have distinct tokens, and the target's choice at every node."""
    rng = np.random.default_rng(seed)
    drawn = [random_parents(rng, nodes, depth) for _ in range(TREES)]
    parents, depths = (np.stack(x) for x in zip(*drawn, strict=True))
    tokens = rng.integers(0, vocab, (TREES, nodes)).astype(np.int32)
    for b in range(TREES):
        for parent in range(nodes):
            children = [n for n in range(1, nodes) if parents[b, n] == parent]
            tokens[b, children] = rng.permutation(max(vocab, len(children)))[: len(children)]
    return Tree(tokens, parents, depths, np.zeros(tokens.shape, np.float32)), rng


@functools.partial(jax.jit, static_argnums=1)
def seen_by(trees, depth):
    packed = pack_mask(ancestors(trees, depth))
    return ancestors(trees, depth), packed, unpack_mask(packed, trees.tokens.shape[1])


@functools.partial(jax.jit, static_argnums=2)
def accepted(trees, chosen, depth):
    return accept(trees, ancestors(trees, depth), chosen, depth)


@pytest.mark.parametrize(("nodes", "depth"), [(1, 0), (9, 8), (40, 7)])
def test_ancestors_and_their_mask_are_the_walk_to_the_root(nodes, depth):
    """Node j is seen by node i exactly when it is i or stands on i's path; the packed mask says the same."""
    trees, _ = random_trees(nodes, nodes, depth, vocab=50)
    expected = np.zeros((TREES, nodes, nodes), bool)
    for b in range(TREES):
        for node in range(nodes):
            here = node
            while True:
                expected[b, node, here] = True
                if here == 0:
                    break
                here = trees.parents[b, here]
    seen, packed, unpacked = seen_by(trees, depth)
    np.testing.assert_array_equal(seen, expected)
    assert packed.dtype == jnp.uint32
    np.testing.assert_array_equal(unpacked, expected)


def test_ancestors_of_a_chain_reach_the_root_at_every_depth():
    """Pointer doubling stops neither too early nor at a power of two."""
    nodes = 17
    for depth in (1, 2, 3, 4, 5, 7, 8, 15, 16):
        chain = np.maximum(np.arange(nodes, dtype=np.int32) - 1, 0)[None]
        chain[:, depth + 1 :] = 0  # the rest hangs on the root
        expected = np.tri(nodes, dtype=bool)
        expected[depth + 1 :, 1:] = np.eye(nodes, dtype=bool)[depth + 1 :, 1:]
        np.testing.assert_array_equal(ancestors(Tree(chain, chain, chain, chain), depth)[0], expected)


@pytest.mark.parametrize("agree", ["all", "often", "never"])
def test_accept_is_the_sequential_walk_along_the_targets_choices(agree):
    """From the root, follow the child that the target chose while there is one; the last choice is the bonus."""
    depth, nodes = 6, 40
    trees, rng = random_trees(nodes + len(agree), nodes, depth, vocab=50)
    chosen = rng.integers(100, 200, trees.tokens.shape).astype(np.int32)  # tokens that no node has
    for b in range(TREES):
        for node in range(1, nodes):  # a random child of each node is the target's choice
            if agree == "all" or (agree == "often" and rng.random() < 0.6):
                chosen[b, trees.parents[b, node]] = trees.tokens[b, node]
    got = jax.tree.map(np.asarray, accepted(trees, chosen, depth))
    for b in range(TREES):
        path, tokens, here = [0], [], 0
        while True:
            tokens.append(chosen[b, here])
            children = (trees.parents[b] == here) & (trees.tokens[b] == tokens[-1]) & (trees.depths[b] > 0)
            if not children.any():
                break
            here = int(children.argmax())
            path.append(here)
        assert got.committed[b] == len(path)
        np.testing.assert_array_equal(got.path[b, : len(path)], path)
        np.testing.assert_array_equal(got.tokens[b, : len(path)], tokens)
    counts = set(np.asarray(got.committed).tolist())
    assert counts == {1} if agree == "never" else len(counts) > 2
