"""Agreement with the PyTorch reference: forwards within 1e-4, and the token ids of whole generations exactly."""

import functools

import golden_helpers as golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_helpers import CHAIN, PLAIN

from jetspec_jax.accept import accept
from jetspec_jax.cache import KVCache
from jetspec_jax.tree import Children, Tree, TreeShape, ancestors, build_tree
from kernels.pallas.tree_attention import causal_mask, pack_mask

EDGE_TREE = TreeShape(budget=14, width=4, depth=7)  # the reference's budget 15 counts the root
TARGETS = ("target_dense", "target_moe", "target_moe_mixed")
HEADS = {"head_causal": "target_dense", "head_bidir": "target_dense", "head_moe_causal": "target_moe"}
close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-4)


def poisoned(config, batch, capacity):
    """An empty cache full of NaN: nothing of it may be read."""
    return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), KVCache.zeros(config, batch, capacity, jnp.float32))


@jax.jit
def forward(model, tokens, positions, cache, lengths, mask):
    out = model(tokens, positions, cache, lengths, mask, (0, 1, 2, 3))
    taps = jnp.stack(jnp.split(out.taps, 4, axis=-1))
    return model.logits(out.hidden), out.hidden, taps, out.rows


def causal(nodes):
    return jnp.broadcast_to(causal_mask(nodes), (2, nodes, 1))


@pytest.mark.parametrize("name", TARGETS)
def test_target_forward_gives_the_references_logits_and_hidden_states(name):
    """Every real position of a full and of a right-padded row; taps are layer outputs before the final norm."""
    data, model = golden.arrays(name), golden.target(name)
    tokens, positions = data["rp_input_ids"], data["rp_position_ids"]
    cache = poisoned(model.config, 2, 24)
    logits, hidden, taps, _ = forward(model, tokens, positions, cache, np.zeros(2, np.int32), causal(24))
    for row, length in ((0, 24), (1, 15)):
        real = np.s_[row, :length]
        close(logits[real], data["rp_logits"][real])
        close(model.embed(tokens)[real], data["rp_hidden_states"][0][real])
        for layer in range(3):
            close(taps[layer][real], data["rp_hidden_states"][layer + 1][real])
        close(taps[3][real], data["rp_last_layer_prenorm"][real])
        close(hidden[real], data["rp_hidden_states"][4][real])


@pytest.mark.parametrize("name", TARGETS)
def test_tree_verify_gives_the_references_logits_and_taps_at_every_node(name):
    """A scattered tree behind a cached prefix of 20 tokens, one forward under the ancestor mask."""
    data, model = golden.arrays(name), golden.target(name)
    nodes, prefix = len(data["tree_token_ids"]), len(data["tree_prefix_ids"])

    def padded(values):  # two equal rows of 24; the spare nodes hang on the root
        return np.broadcast_to(np.pad(values, (0, 24 - len(values))), (2, 24)).astype(np.int32)

    lengths = np.full(2, prefix, np.int32)
    cache = poisoned(model.config, 2, 24)
    _, _, taps, rows = forward(
        model, padded(data["tree_prefix_ids"]), padded(np.arange(prefix)), cache, np.zeros(2, np.int32), causal(24)
    )
    close(np.concatenate([taps[0], taps[2]], -1)[0, :prefix], data["tree_prefix_taps"])
    cache = cache.append(rows, np.zeros(2, np.int32), lengths)
    parents, depths = padded(np.maximum(data["tree_parents"], 0)), padded(data["tree_depths"])
    tree = Tree(padded(data["tree_token_ids"]), parents, depths, np.zeros((2, 24), np.float32))
    mask = pack_mask(ancestors(jax.tree.map(jnp.asarray, tree), int(depths.max())))
    logits, _, taps, _ = forward(model, tree.tokens, prefix + depths, cache, lengths, mask)
    close(logits[0, :nodes], data["tree_logits"])
    close(np.concatenate([taps[0], taps[2]], -1)[0, :nodes], data["tree_taps"])


@jax.jit
def head_round(model, head, cache, taps, start, count, tokens):
    cache = head.extend_context(cache, taps, start, count)
    hidden = head(model.embed(tokens), cache, start + count)
    return cache, hidden, model.logits(hidden), head.fuse(taps)


@pytest.mark.parametrize("name", HEADS)
def test_head_forward_gives_the_references_hidden_states_and_logits(name):
    """Contexts of 1, 7, 24 and 40 tokens, and a block whose first slots hold true tokens, as rows of one batch."""
    data, model, head = golden.arrays(name), golden.target(HEADS[name]), golden.head(name)
    rows, lengths = ("a1", "a7", "a24", "a40", "cond24"), np.array([1, 7, 24, 40, 24], np.int32)
    tokens = np.stack([data[f"{row}_noise_ids"] for row in rows])
    np.testing.assert_array_equal(head.block_tokens(jnp.asarray(tokens[:4, 0])), tokens[:4])
    taps = np.broadcast_to(data["a40_target_hidden"], (5, 40, 128))
    cache = poisoned(head.config, 5, 48)
    _, hidden, logits, fused = head_round(model, head, cache, taps, np.zeros(5, np.int32), lengths, tokens)
    close(fused[0], data["a40_context"])
    for b, row in enumerate(rows):
        close(hidden[b], data[f"{row}_hidden"])
        close(logits[b], data[f"{row}_logits"])


@pytest.mark.parametrize("name", HEADS)
def test_head_rounds_over_its_cache_give_the_references_outputs_and_cache(name):
    """Five rounds that add 10, 4, 1, 8 and 0 context rows: outputs of each, and the cache at the end."""
    data, model, head = golden.arrays(name), golden.target(HEADS[name]), golden.head(name)
    cache = poisoned(head.config, 5, 48)
    for r, (before, after) in enumerate(zip(data["b_cached_len_before"], data["b_ctx_len"], strict=True)):
        taps = np.full((5, 40, 128), np.nan, np.float32)
        taps[:, : after - before] = data["b_target_hidden"][before:after]
        start, count = np.full(5, before, np.int32), np.full(5, after - before, np.int32)
        tokens = np.broadcast_to(data[f"b{r}_noise_ids"], (5, 8))
        cache, hidden, logits, _ = head_round(model, head, cache, taps, start, count, tokens)
        close(hidden[0], data[f"b{r}_hidden"])
        close(logits[0, 1:], data[f"b{r}_logits"])
    for index, layer in enumerate(cache.layers):
        close(layer.key[0, :, :23], data[f"b_cache_k{index}"])
        close(layer.value[0, :, :23], data[f"b_cache_v{index}"])
        assert np.isnan(layer.key[:, :, 23:]).all(), "only committed rows are written"


def runs(mode, target="target_dense", **fields):
    """Runs of e2e.json by prompt."""
    wanted = {"mode": mode, "target": target, **fields}
    found = [run for run in golden.cases("e2e")["runs"] if all(run[k] == v for k, v in wanted.items())]
    return sorted(found, key=lambda run: run["prompt"])


@functools.cache
def spare_token(name="target_dense"):
    """An id that no run generates and that is no mask token: declared EOS, it ends nothing."""
    used = {token for run in golden.cases("e2e")["runs"] if run["target"] == name for token in run["token_ids"]}
    used |= {token for row in golden.arrays(name)["greedy_tokens"].tolist() for token in row}
    return next(token for token in range(1, 255) if token not in used)


def generate(model, head, prompts, max_new_tokens, shape, eos=None):
    """Five rows at a time (some of them padding) and one EOS id, so that a mode compiles once for a target."""
    drafter = golden.head(head) if head else None
    eos = spare_token() if eos is None else eos
    return golden.generate(model, drafter, prompts, max_new_tokens, shape, (eos,), batch=5)


def greedy_tokens(name="target_dense"):
    return [run["token_ids"] for run in runs("greedy", name)]


@pytest.mark.parametrize("name", TARGETS)
def test_plain_decoding_gives_the_references_greedy_tokens(name):
    """64 tokens for the five prompts of e2e.json, where it has them, and 48 for the three of the target's arrays."""
    model, eos = golden.target(name), spare_token(name)
    if greedy_tokens(name):
        rows = generate(model, None, golden.cases("e2e")["prompts"], [64] * 5, PLAIN, eos)
        assert [row.tokens for row in rows] == greedy_tokens(name)
    data = golden.arrays(name)
    prompts = [ids[:n].tolist() for ids, n in zip(data["prompt_ids"], data["prompt_len"], strict=True)]
    rows = generate(model, None, prompts, [48] * 3, PLAIN, eos)
    assert [row.tokens for row in rows] == data["greedy_tokens"].tolist()


def limited(accept_lengths, room):
    """Tokens that rounds commit when all but the first `room` are cut off."""
    before = np.concatenate([[0], np.cumsum(accept_lengths)[:-1]])
    return [int(min(count, room - seen)) for count, seen in zip(accept_lengths, before, strict=True) if seen < room]


@pytest.mark.parametrize("name", HEADS)
def test_chain_decoding_gives_the_references_tokens_and_accept_lengths(name):
    """Width 1: the reference's chain, round by round, also where the cap would cut its last round."""
    expected = runs("chain", HEADS[name], head=name)
    prompts, model, eos = golden.cases("e2e")["prompts"], golden.target(HEADS[name]), spare_token(HEADS[name])
    rows = generate(model, name, prompts, [64] * 5, CHAIN, eos)
    assert [row.tokens for row in rows] == [run["token_ids"] for run in expected]
    assert [row.committed for row in rows] == [limited(run["accept_lengths"], 63) for run in expected]
    # A last round of up to 8 tokens ends at 72 at most: nothing is cut off.
    rows = generate(model, name, prompts, [72] * 5, CHAIN, eos)
    for row, run in zip(rows, expected, strict=True):
        assert row.committed[: len(run["accept_lengths"])] == run["accept_lengths"]


@pytest.mark.parametrize("name", ["head_causal", "head_moe_causal"])
def test_tree_decoding_gives_the_greedy_tokens_in_fewer_rounds_than_the_chain(name):
    """Losslessness; and over all prompts the tree commits more a round than the chain, which it contains."""
    target = HEADS[name]
    model, eos = golden.target(target), spare_token(target)
    rows = generate(model, name, golden.cases("e2e")["prompts"], [64] * 5, EDGE_TREE, eos)
    assert [row.tokens for row in rows] == greedy_tokens(target)
    chain = sum(len(run["accept_lengths"]) for run in runs("chain", target, head=name))
    assert sum(len(row.committed) for row in rows) < chain


def relabelled(model, old, new):
    """The target that calls `old` `new` and `new` `old`: its embeddings and lm_head outputs swapped."""
    order = np.arange(model.config.vocab_size)
    order[[old, new]] = new, old

    def swap(path, leaf):
        key = jax.tree_util.keystr(path)
        return leaf[order] if "embed_tokens" in key or "lm_head" in key else leaf

    return jax.tree_util.tree_map_with_path(swap, model), order


@pytest.mark.parametrize(("mode", "head", "shape"), [
    ("generate", None, PLAIN), ("chain", "head_causal", CHAIN), ("tree", "head_causal", EDGE_TREE),
])  # fmt: skip
def test_short_caps_give_the_references_tokens(mode, head, shape):
    """1, 2 and 7 new tokens: never more than the cap, whatever was accepted."""
    short = [case for case in golden.cases("e2e_edge") if case["kind"] == "short" and case["max_new_tokens"] > 0]
    assert len(short) == 15
    for batch in (short[i : i + 5] for i in range(0, len(short), 5)):
        prompts = [golden.cases("e2e")["prompts"][case["prompt"]] for case in batch]
        rows = generate(golden.target(), head, prompts, [case["max_new_tokens"] for case in batch], shape)
        assert [row.tokens for row in rows] == [case[mode] for case in batch]


@pytest.mark.parametrize(("mode", "head", "shape"), [
    ("generate", None, PLAIN), ("chain", "head_causal", CHAIN), ("tree", "head_causal", EDGE_TREE),
])  # fmt: skip
def test_eos_ends_a_row_where_the_references_does(mode, head, shape):
    """EOS is the last token, also inside an accepted block; tokens are relabelled so that one id is EOS in all."""
    ended = [case for case in golden.cases("e2e_edge") if case["kind"] == "eos"]
    assert len(ended) == 20
    for case in ended:
        (eos,) = case["eos_ids"]
        model, order = relabelled(golden.target(), eos, spare_token())
        prompt = order[golden.cases("e2e")["prompts"][case["prompt"]]].tolist()
        (row,) = generate(model, head, [prompt], [case["max_new_tokens"]], shape)
        assert order[row.tokens].tolist() == case[mode]
        assert row.tokens[-1] == spare_token()


def table_scorer(tokens, logprobs):
    """Children by a table `[B, depth, K]` that serves all parents of a depth."""

    def score(depth, parents):
        shape = (*parents.shape, tokens.shape[-1])
        return Children(*(jnp.broadcast_to(x[:, None, depth - 1], shape) for x in (tokens, logprobs)))

    return score


@functools.partial(jax.jit, static_argnames=("shape",))
def tree_of_table(anchors, tokens, logprobs, shape):
    return build_tree(anchors, table_scorer(tokens, logprobs), shape)


def test_trees_never_expect_less_than_the_references_of_the_same_size():
    """The sum of path probabilities, the expected accepted length, against all 99 reference trees.

    The tree of a budget is the best of a larger one's nodes, so one compilation serves all budgets.
    """
    cases = [case for kind in ("build", "build_ties", "build_edge") for case in golden.cases("trees")[kind]]
    tokens = np.tile(np.arange(1000, 1007, dtype=np.int32), (len(cases), 15, 1))
    logprobs = np.full(tokens.shape, -np.inf, np.float32)
    for b, case in enumerate(cases):
        tokens[b, : case["D"], : case["K"]] = case["topk_tokens"]
        logprobs[b, : case["D"], : case["K"]] = case["topk_logprobs"]
    anchors = np.array([case["root_token"] for case in cases], np.int32)
    tree = tree_of_table(anchors, tokens, logprobs, TreeShape(budget=254, width=7, depth=15))
    better = 0
    for scores, case in zip(np.asarray(tree.scores, np.float64), cases, strict=True):
        best = np.exp(np.sort(scores)[::-1])
        for way in ("accum_logp", "top2gap_b1", "top2gap_b2"):
            reference = case[way]
            ours, theirs = best[: reference["num_nodes"]].sum(), np.exp(reference["cum_logprob"]).sum()
            assert ours >= theirs - 1e-6
            better += ours > theirs + 1e-6
    assert better > len(cases)


@pytest.mark.parametrize("index", range(5))
def test_edge_trees_never_expect_less_than_the_references(index):
    """Budgets 1, 2 and 3 (root included), above the full tree, and K = 1, each as a tree of that very budget."""
    case = golden.cases("trees")["build_edge"][index]
    reference = case["accum_logp"]
    shape = TreeShape(case["budget"] - 1, case["K"], case["D"])
    assert shape.nodes == reference["num_nodes"]
    table = (np.array([case["topk_tokens"]], np.int32), np.array([case["topk_logprobs"]], np.float32))
    tree = tree_of_table(np.array([case["root_token"]], np.int32), *table, shape)
    assert np.exp(tree.scores[0]).sum() >= np.exp(reference["cum_logprob"]).sum() - 1e-6


def test_acceptance_is_the_references():
    """Accepted path, its length and the committed tokens of 20 trees, padded to one size with unmatchable nodes."""
    cases = golden.cases("trees")["accept"]
    nodes = max(len(case["tokens"]) for case in cases)
    depth = max(max(case["depths"]) for case in cases)

    def stacked(name, fill):
        rows = [case[name] + [fill] * (nodes - len(case[name])) for case in cases]
        return np.array(rows, np.int32)

    tree = Tree(
        tokens=stacked("tokens", -1),
        parents=np.maximum(stacked("parents", 0), 0),
        depths=stacked("depths", 1),
        scores=np.zeros((len(cases), nodes), np.float32),
    )
    chosen = stacked("target_argmax", 0)
    got = jax.jit(lambda t, c: accept(t, ancestors(t, depth), c, depth))(tree, chosen)
    for b, case in enumerate(cases):
        count = int(got.committed[b])
        assert count == case["accepted_len"] + 1
        assert got.path[b, :count].tolist() == case["accepted_path"]
        # The reference lists the root's token first and the correction apart.
        assert [*got.tokens[b, : count - 1].tolist()] == [case["tokens"][n] for n in case["accepted_path"][1:]]
        assert int(got.tokens[b, count - 1]) == case["correction"]
