"""Sampling draws exactly from the processed distribution, whatever was drafted."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafts import ANTI, MIX, OFFSPINE, ORACLE, TableDraft, injected, tiny_target
from scipy import stats

from jetspec_jax.cache import KVCache
from jetspec_jax.decode import LoopSpec, NoDrafter, decode, prefill
from jetspec_jax.sampling import Noise, Sampling, choose
from jetspec_jax.tree import TreeShape
from kernels.pallas.tree_attention import causal_mask

pytestmark = pytest.mark.usefixtures("compile_quickly")


# One set of seeds per test, fixed, so that a test either always passes or never does.
P_VALUE = 1e-3
SETTINGS = [
    Sampling(0.5),
    Sampling(1.0),
    Sampling(1.5),
    Sampling(1.0, min_p=0.2),
    Sampling(1.0, top_k=3),
    Sampling(0.7, top_k=1),
    Sampling(1.0, top_k=100),
    Sampling(1.0, top_p=0.8),
    Sampling(1.5, top_p=0.6, min_p=0.3),
    Sampling(1.0, top_p=1e-6),
    Sampling(1.3, top_k=5, top_p=0.8),
    Sampling(1.3, top_k=5, top_p=0.9, min_p=0.15),
    Sampling(2.0, min_p=1.0),
]


def processed(logits, sampling):
    """The distribution that `Sampling` documents, float64 `[..., vocab]`, in plain numpy, one row at a time."""
    if logits.ndim > 1:
        return np.stack([processed(x, sampling) for x in logits])
    scores = logits.astype(np.float64) / sampling.temperature
    order = np.argsort(-scores, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    p = np.exp(scores[order] - scores.max())
    p /= p.sum()
    if sampling.top_p < 1:
        enough = np.nonzero(np.cumsum(p) >= sampling.top_p)[0][0] + 1
        order, p = order[:enough], p[:enough]
    kept = p >= sampling.min_p * p.max()
    out = np.zeros(len(logits))
    out[order[kept]] = p[kept] / p[kept].sum()
    return out


@functools.partial(jax.jit, static_argnames=("mode", "levels"))
def draw(logits, seeds, start, knobs, *, mode, levels=1):
    """One token `[B, levels]` per seed and level from the same `logits` `[vocab]`."""
    noise = Noise(jax.vmap(jax.random.key)(seeds), jnp.broadcast_to(start, seeds.shape))
    depths = jnp.broadcast_to(jnp.arange(levels, dtype=jnp.int32)[None], (*seeds.shape, levels))
    everywhere = jnp.broadcast_to(logits[None, None], (*depths.shape, logits.shape[0]))
    return choose(everywhere, depths, noise, mode, knobs, levels)


def draws(logits, sampling, number, *, levels=1, start=3):
    args = (jnp.asarray(logits), jnp.arange(number, dtype=jnp.uint32), jnp.int32(start))
    return np.array(draw(*args, sampling.knobs, mode=sampling.mode, levels=levels))


def agreement(counts, probabilities):
    """The chi-square p-value of `counts` under `probabilities`; cells that expect little are pooled."""
    wanted = probabilities * counts.sum()
    assert counts[wanted == 0].sum() == 0, "a token outside the kept set was drawn"
    small = wanted < 5
    got = np.append(counts[~small], counts[small].sum())
    want = np.append(wanted[~small], wanted[small].sum())
    got, want = got[want > 0], want[want > 0]
    return stats.chisquare(got, want).pvalue if len(got) > 1 else 1.0


LOGITS = np.array([0.3, 2.0, -1.0, 1.6, 0.9, -3.0, 2.2, 0.0], np.float32)


# The choice.


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_choices_follow_the_processed_distribution(sampling):
    """40000 draws agree with temperature, top_k, top_p and min_p applied in that order, and none is outside them."""
    got = np.bincount(draws(LOGITS, sampling, 40000)[:, 0], minlength=8)
    assert agreement(got, processed(LOGITS, sampling)) > P_VALUE


def test_no_choice_is_ever_outside_the_kept_set():
    """For many random logits, offset and scaled."""
    rng = np.random.default_rng(0)
    for sampling in SETTINGS:
        for scale in (0.1, 1.0, 30.0):
            logits = (rng.normal(size=8) * scale + 50).astype(np.float32)
            kept = np.nonzero(processed(logits, sampling) > 0)[0]
            assert set(draws(logits, sampling, 40000)[:, 0]) <= set(kept)


def test_the_reference_itself_on_a_case_done_by_hand():
    """0.5, 0.25, 0.125, 0.125: top_p 0.6 keeps two, min_p 0.5 too, top_k 3 three."""
    logits = np.log(np.array([0.125, 0.5, 0.25, 0.125]))
    np.testing.assert_allclose(processed(logits, Sampling(1.0, top_p=0.6)), [0, 2 / 3, 1 / 3, 0])
    np.testing.assert_allclose(processed(logits, Sampling(1.0, min_p=0.4)), [0, 2 / 3, 1 / 3, 0])
    np.testing.assert_allclose(processed(logits, Sampling(1.0, top_k=3)), np.array([1, 4, 2, 0]) / 7)
    np.testing.assert_allclose(processed(logits, Sampling(0.5, top_k=2)), [0, 0.8, 0.2, 0])


def test_distinct_positions_and_distinct_seeds_use_distinct_noise():
    """Tokens of neighbouring positions are independent, and so are those of neighbouring seeds."""
    got = draws(np.zeros(6, np.float32), Sampling(1.0), 20000, levels=3)
    pairs = [(got[:, 0], got[:, 1]), (got[:, 1], got[:, 2]), (got[:, 0], got[:, 2]), (got[1:, 0], got[:-1, 0])]
    pairs.append((got[1:, 0], got[:-1, 1]))  # seed + position must not be what counts
    for one, other in pairs:
        table = np.zeros((6, 6))
        np.add.at(table, (one, other), 1)
        assert stats.chi2_contingency(table).pvalue > P_VALUE
        assert np.mean(one == other) < 0.2


def test_noise_depends_on_the_absolute_position_alone():
    """Depth d of a round that starts at s draws what depth d - 1 of one that starts at s + 1 does."""
    sampling = Sampling(1.0)
    here, there = (draws(LOGITS, sampling, 500, levels=3, start=s) for s in (7, 8))
    assert np.array_equal(here[:, 1:], there[:, :-1])
    assert not np.array_equal(here[:, 0], there[:, 0])


@pytest.mark.parametrize("filters", [{}, {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_temperature_to_zero_meets_greedy(filters):
    """At 1e-6 every draw is the argmax, for logits of any size: nothing overflows to NaN."""
    rng = np.random.default_rng(1)
    for scale in (1.0, 100.0, 1e30):
        logits = (rng.normal(size=8) * scale).astype(np.float32)
        assert np.all(draws(logits, Sampling(1e-6, **filters), 40000) == np.argmax(logits))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", (-1.0, -1e-9, float("inf"), float("nan"))),
        ("top_k", (-1,)),
        ("top_p", (0.0, -0.1, 1.1, float("nan"))),
        ("min_p", (-0.1, 1.1, float("nan"))),
    ],
)
def test_values_out_of_range_are_refused_by_name(field, values):
    for value in values:
        with pytest.raises(ValueError, match=field) as caught:
            Sampling(**{"temperature": 1.0, field: value})
        assert str(value) in str(caught.value)


# The loop.

ROWS, VOCAB = 8192, 6
PROMPT = [4]
TREE = TreeShape(8, 3, 2)


@functools.cache
def small():
    return tiny_target(3, vocab=VOCAB, hidden=16, layers=1, logit_scale=1.5)


@functools.cache
def next_logits():
    """Logits `[6, 6, 3, 6]` of the next token after the prompt, after `a`, and after `a, b`."""
    pairs = list(itertools.product(range(VOCAB), repeat=2))
    tokens = jnp.asarray([PROMPT + list(x) for x in pairs], jnp.int32)
    cache = KVCache.zeros(small().config, len(pairs), 1, jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(3, dtype=jnp.int32)[None], tokens.shape)
    out = small()(tokens, positions, cache, jnp.zeros((len(pairs),), jnp.int32), causal_mask(3))
    return np.array(small().logits(out.hidden)).reshape(VOCAB, VOCAB, 3, VOCAB)


def joint(sampling):
    """The exact probabilities `[6, 6, 6]` of the three tokens after the prompt."""
    p = processed(next_logits().reshape(-1, VOCAB), sampling).reshape(next_logits().shape)
    return p[0, 0, 0][:, None, None] * p[:, 0, 1][:, :, None] * p[:, :, 2]


def table(kind, sampling):
    """Draft logits by anchor: one-hot, the target's own law, or one as far from it as can be."""
    p = processed(next_logits().reshape(-1, VOCAB), Sampling(sampling.temperature)).reshape(next_logits().shape)
    first = p[:, 0, 1]
    law = np.stack([first, np.einsum("ab,abc->ac", first, p[:, :, 2])], axis=1)
    if kind == "equal":
        return np.log(law)
    if kind == "far":
        return -5 * np.log(law)
    return np.where(np.arange(VOCAB) == np.argmax(law, axis=-1)[..., None], 0.0, -np.inf)


@pytest.mark.parametrize("kind", ["far", "equal", "one-hot"])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(0.5), Sampling(1.0), Sampling(1.5), Sampling(1.0, top_k=3), Sampling(1.5, top_p=0.8)],
    ids=lambda s: f"T{s.temperature}-k{s.top_k}-p{s.top_p}",
)
def test_the_joint_law_of_three_tokens_is_plain_samplings(sampling, kind):
    """Prefill's token and the two of the rounds after it, over 16384 seeds, have the target's exact joint law,
    though which tokens are drafted depends on what was drawn before."""
    drafter = TableDraft(jnp.asarray(table(kind, sampling), jnp.float32))
    tokens = jnp.asarray(np.tile(np.array([*PROMPT, 0, 0, 0], np.int32), (ROWS, 1)))
    lengths, limits = jnp.full((ROWS,), 1, jnp.int32), jnp.full((ROWS,), 4, jnp.int32)
    counts, accepted = np.zeros((VOCAB,) * 3), 0
    for part in range(2):
        seeds = jnp.arange(ROWS, dtype=jnp.uint32) + jnp.uint32(part * ROWS)
        spec = LoopSpec(TreeShape(0, 1, 0), (), sampling.mode)
        state = prefill(
            small(),
            drafter,
            tokens,
            lengths,
            limits,
            seeds,
            sampling.knobs,
            eos_ids=spec.eos_ids,
            mode=spec.mode,
            chunk=4,
        )
        spec = spec._replace(tree=TREE)
        state = decode(small(), drafter, state, jnp.int32(9), sampling.knobs, spec=spec)
        new = np.array(state.tokens)[:, 1:4]
        np.add.at(counts, tuple(new.T), 1)
        accepted += int(np.sum(state.drafted))
    assert agreement(counts.ravel(), joint(sampling).ravel()) > P_VALUE
    assert kind == "far" or accepted > ROWS / 2  # the loop was really tried


CAPACITY = 96
HOT = [Sampling(0.7), Sampling(1.0), Sampling(1.5)]
LENGTHS = np.array([3, 16, 1, 25, 8], np.int32)
SEEDS = np.array([0, 7, 7, 2**32 - 1, 12345], np.uint32)


@functools.cache
def target():
    return tiny_target(0)


@functools.cache
def prompts():
    return np.random.default_rng(0).integers(0, 64, (5, CAPACITY)).astype(np.int32)


def sample(drafter, sampling, tree, rows=(0, 1, 2, 3, 4)):
    """Whole texts `[rows, CAPACITY]` of up to 60 new tokens, and the rounds taken."""
    rows = list(rows)
    lengths = LENGTHS[rows]
    args = map(jnp.asarray, (prompts()[rows], lengths, lengths + 60, SEEDS[rows]))
    spec = LoopSpec(TreeShape(0, 1, 0), (16, 26), sampling.mode)
    state = prefill(target(), drafter, *args, sampling.knobs, eos_ids=spec.eos_ids, mode=spec.mode, chunk=16)
    state = decode(target(), drafter, state, jnp.int32(1000), sampling.knobs, spec=spec._replace(tree=tree))
    ends = np.array(state.lengths)[:, None] + 1
    return np.where(np.arange(CAPACITY) < ends, np.array(state.tokens), -1), np.array(state.rounds)


@functools.cache
def plainly_sampled(sampling):
    return sample(NoDrafter(), sampling, TreeShape(0, 1, 0))


@pytest.mark.parametrize("sampling", HOT, ids=lambda s: f"T{s.temperature}")
def test_equal_seeds_give_equal_text_by_either_method(sampling):
    """Sampled with draft trees, the text is token for token that of plain sampling, whatever was drafted."""
    plain, steps = plainly_sampled(sampling)
    for modes in ([ORACLE, OFFSPINE, ANTI, MIX, MIX], [MIX, ANTI, ORACLE, OFFSPINE, ORACLE]):
        text = np.maximum(plain, 0)
        drafted, rounds = sample(injected(target(), text, modes, seeds=range(5)), sampling, TreeShape(16, 8, 7))
        assert np.array_equal(drafted, plain)
        assert rounds.sum() < steps.sum()


def test_equal_seeds_give_equal_text_in_any_batch():
    """The same rows in another order draw the same tokens; another seed draws others."""
    sampling, order = HOT[1], [4, 2, 0, 3, 1]
    plain, _ = plainly_sampled(sampling)
    text, _ = sample(NoDrafter(), sampling, TreeShape(0, 1, 0), order)
    assert np.array_equal(text, plain[order])
    text, _ = sample(NoDrafter(), sampling, TreeShape(0, 1, 0), [3, 3, 0, 3, 1])
    assert np.array_equal(text, plain[[3, 3, 0, 3, 1]])
    args = (jnp.asarray(prompts()[[1] * 5]), jnp.full((5,), 16, jnp.int32), jnp.full((5,), 76, jnp.int32))
    spec = LoopSpec(TreeShape(0, 1, 0), (16, 26), sampling.mode)
    state = prefill(
        target(),
        NoDrafter(),
        *args,
        jnp.arange(5, dtype=jnp.uint32),
        sampling.knobs,
        eos_ids=spec.eos_ids,
        mode=spec.mode,
        chunk=16,
    )
    state = decode(target(), NoDrafter(), state, jnp.int32(1000), sampling.knobs, spec=spec)
    assert len({tuple(x) for x in np.array(state.tokens)[:, 16:20]}) > 1


def test_a_temperature_near_zero_gives_the_greedy_text():
    cold, _ = sample(NoDrafter(), Sampling(1e-6), TreeShape(0, 1, 0))
    drafter = injected(target(), np.maximum(cold, 0), MIX, seeds=range(5))
    greedy, _ = sample(drafter, Sampling(), TreeShape(16, 8, 7))
    assert np.array_equal(cold, greedy)
    drafted, _ = sample(drafter, Sampling(1e-6), TreeShape(16, 8, 7))
    assert np.array_equal(drafted, greedy)
