"""What infer.acceptance reports: gaps of branches are what plain forwards over their paths say, and tau is a share."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafts import TableDraft, tiny_target
from tiny import head_config, random_module

from infer.acceptance import faithfulness, interval, main
from infer.faithfulness import branch_gaps, gaps_of_tree
from jetspec_jax.cache import KVCache
from jetspec_jax.decode import draft_tree, prefill
from jetspec_jax.engine import GenerationConfig
from jetspec_jax.head import DraftHead
from jetspec_jax.models import EMBEDDED_HEAD, EMBEDDED_TARGET, Target
from jetspec_jax.sampling import Sampling
from jetspec_jax.tree import TreeShape
from kernels.pallas.tree_attention import causal_mask

pytestmark = pytest.mark.usefixtures("compile_quickly")
VOCAB, DEPTH, EOS = 12, 3, 5
SHAPE = TreeShape(14, 3, DEPTH)


def log_softmax(x):
    x = np.asarray(x, np.float64)
    return x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)


@pytest.fixture(scope="module")
def case():
    """Random drafts for a random target behind three prompts, as the tree that they make."""
    target = tiny_target(0, vocab=VOCAB, logit_scale=4.0)
    rng = np.random.default_rng(0)
    table = rng.normal(size=(VOCAB, DEPTH, VOCAB)).astype(np.float32) * 2
    table[:, :, EOS] += 2  # so that some branches end early
    drafter = TableDraft(jnp.asarray(table))
    prompts = rng.integers(0, VOCAB, (3, 16)).astype(np.int32)
    lengths = np.array([4, 7, 9], np.int32)
    tokens = np.zeros((3, 32), np.int32)
    tokens[:, :16] = np.where(np.arange(16)[None] < lengths[:, None], prompts, 0)
    state = prefill(
        target, drafter, tokens, lengths, lengths + 8, np.zeros(3, np.uint32), Sampling().knobs,
        eos_ids=(), mode=Sampling().mode, chunk=16,
    )  # fmt: skip
    tree, _ = jax.jit(draft_tree, static_argnames="shape")(target, drafter, state, SHAPE)
    found = gaps_of_tree(target, drafter, state, SHAPE, (EOS,))
    return target, table, jax.device_get((state, tree, *found))


def paths(tree, row):
    """The node indices from below the root to every node."""
    for node in range(1, tree.tokens.shape[1]):
        path = []
        while node:
            path.insert(0, node)
            node = tree.parents[row, node]
        yield path


@jax.jit
def next_token_logits(target, tokens):
    empty = KVCache.zeros(target.config, 1, 1, jnp.float32)
    size = tokens.shape[1]
    out = target(tokens, jnp.arange(size)[None], empty, jnp.zeros((1,), jnp.int32), causal_mask(size))
    return target.logits(out.hidden)


def test_gaps_are_drafted_less_target_log_probabilities_along_every_path(case):
    target, table, (state, tree, gaps, _) = case
    for row, length in enumerate(state.lengths):
        text = state.tokens[row, : length + 1]
        for path in paths(tree, row):
            tokens = tree.tokens[row, path]
            drafted = sum(log_softmax(table[text[-1], i])[token] for i, token in enumerate(tokens))
            full = np.zeros((1, 16), np.int32)
            full[0, : length + 1 + len(tokens)] = [*text, *tokens]
            logp = log_softmax(next_token_logits(target, full)[0])
            taken = sum(logp[length + i, token] for i, token in enumerate(tokens))
            np.testing.assert_allclose(gaps[row, path[-1]], drafted - taken, atol=1e-4)


def test_branches_end_at_leaves_and_at_their_first_end_of_sequence(case):
    _, _, (state, tree, _, ends) = case
    early = 0
    for row in range(len(state.lengths)):
        assert not ends[row, 0]
        for path in paths(tree, row):
            tokens = tree.tokens[row, path].tolist()
            leaf = path[-1] not in tree.parents[row, 1:]
            expected = EOS not in tokens[:-1] and (leaf or tokens[-1] == EOS)
            early += expected and not leaf
            assert ends[row, path[-1]] == expected
    assert early > 0


def result(rounds, tokens):
    class Result:
        pass

    made = Result()
    made.rounds, made.accepted_lengths = rounds, [tokens / max(rounds, 1)] * rounds
    return made


def test_the_interval_holds_tau_and_is_a_point_where_prompts_agree():
    low, high = interval([result(4, 8)] * 5)
    assert low == high == 2
    uneven = [result(2, 12), result(10, 20), result(5, 30), result(4, 4), result(0, 0)]
    low, high = interval(uneven)
    assert 1 <= low < 66 / 21 < high <= 6


REFUSED = [
    (["--budgets", "none"], "--budgets takes numbers of nodes"),
    (["--faithfulness", "--mesh", "data=2"], "--faithfulness takes prompts one by one"),
]


def test_the_command_reports_a_head_at_a_budget_and_refuses_bad_budgets_before_it_loads(tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join((EMBEDDED_TARGET.parent / "held_out.jsonl").read_text().splitlines()[:2]))
    flags = ["--prompts", str(prompts), "--batch-size", "2", "--max-new-tokens", "40", "--no-compilation-cache"]
    flags += ["--draft-head", str(EMBEDDED_HEAD), "--mesh", "model=1"]
    assert main([*flags, "--budgets", "chain", "--faithfulness", "--repeats", "1"]) == 0
    [row, speed] = map(json.loads, capsys.readouterr().out.splitlines())
    assert (row["draft_head"], row["budget"]) == (str(EMBEDDED_HEAD), "chain")
    assert row["tau"] == row["tokens"] / row["rounds"]
    assert row["low"] <= row["tau"] <= row["high"]
    assert row["branches"] == row["rounds"]  # the rounds of a chain have a branch each
    assert 0 < row["gap_below_5"] <= 1
    assert (speed["draft_head"], speed["budget"]) == (row["draft_head"], row["budget"])
    assert speed["seconds"] > 0 and speed["speedup"] > 0
    for bad, part in REFUSED:
        assert main([*bad, "--model", "/nowhere", "--no-compilation-cache"]) == 2
        assert part in capsys.readouterr().err


def test_figures_without_a_round_are_null(monkeypatch):
    """An answer of one token is prefill's alone: no branch was drafted, and JSON has no NaN."""
    monkeypatch.setattr("infer.acceptance.branch_gaps", lambda *_: np.zeros(0, np.float32))
    row = faithfulness(None, None, [], None, GenerationConfig())
    assert row.pop("branches") == 0
    assert set(row.values()) == {None} and len(row) == 4


def test_gaps_are_measured_with_the_engines_products(monkeypatch):
    """Whole float32 products for a float32 target, which accelerators otherwise round."""
    seen = []

    def stop(*_, **__):
        seen.append(jax.config.jax_default_matmul_precision)
        raise RuntimeError("seen enough")

    monkeypatch.setattr("infer.faithfulness.prefill", stop)
    target = Target(tiny_target(0, vocab=VOCAB, logit_scale=4.0), None, (EOS,), pathlib.Path("none"))
    head = random_module(DraftHead, head_config(VOCAB), 0)
    with pytest.raises(RuntimeError, match="seen enough"):
        branch_gaps(target, head, [[1, 2]], None, GenerationConfig())
    assert seen == ["highest"]
