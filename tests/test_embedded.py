"""The model that ships: it loads, solves held-out problems, and its drafts are accepted and change nothing."""

import itertools

import pytest

import jetspec_jax
from jetspec_jax.models import EMBEDDED_HEAD, EMBEDDED_TARGET
from train.evaluate import held_out_prompts
from train.tasks import problems, solved

COUNT = 100


@pytest.fixture(scope="module")
def answers():
    """Greedy answers to held-out problems, by plain decoding and by trees of 16 nodes."""
    target = jetspec_jax.load_target()
    head = jetspec_jax.load_draft_head(target=target)
    prompts = [jetspec_jax.chat_prompt(target, prompt) for prompt in held_out_prompts(COUNT)]
    return [
        jetspec_jax.generate(target, head, prompts, method=method, budget=16, max_new_tokens=192)
        for method in ("ar", "jetspec")
    ]


def test_the_shipped_files_are_small():
    """Everything in assets/ together is at most 16 MB, so that a clone stays quick."""
    assert sum(path.stat().st_size for path in EMBEDDED_TARGET.parent.rglob("*") if path.is_file()) <= 16e6


def test_drafting_changes_no_token_of_a_hundred_answers(answers):
    """Float32 greedy decoding with drafts equals decoding without."""
    plain, drafted = answers
    assert [r.token_ids for r in plain] == [r.token_ids for r in drafted]


def test_most_held_out_problems_are_solved(answers):
    """At least nine in ten; none of them was in training, by construction."""
    held_out = itertools.islice(problems(0, split="held_out"), COUNT)
    assert sum(solved(p, r.text) for p, r in zip(held_out, answers[1], strict=True)) >= 0.9 * COUNT


def test_a_round_commits_many_tokens(answers):
    """Trees of 16 nodes commit at least 9 tokens a round."""
    drafted = answers[1]
    assert sum(sum(r.accepted_lengths) for r in drafted) / sum(r.rounds for r in drafted) >= 9


def test_the_kernel_gives_the_tokens_that_xla_gives():
    """Prefill, draft and verify with the Pallas kernel, interpreted where there is no GPU: the same text and rounds."""
    target = jetspec_jax.load_target()
    head = jetspec_jax.load_draft_head(target=target)
    prompt = jetspec_jax.chat_prompt(target, next(iter(held_out_prompts(1))))
    options = {"budget": 16, "max_new_tokens": 24}
    [xla], [pallas] = (
        jetspec_jax.generate(target, head, [prompt], attention=attention, **options) for attention in ("xla", "pallas")
    )
    assert pallas.token_ids == xla.token_ids
    assert pallas.accepted_lengths == xla.accepted_lengths


def test_the_head_is_stamped_with_how_it_was_trained():
    """Block size, causality, the parent term and mixed fill are in the exported config."""
    config = jetspec_jax.load_draft_head(EMBEDDED_HEAD).config
    assert (config.block_size, config.causal_head, config.parent_rank, config.mixed_fill) == (32, True, 64, 0.0)
