"""Prompts to results: what `generate` and its neighbours promise, on tiny checkpoints written to disk and loaded.

The head is random, but a tree of 8 children in a vocabulary of 12 still meets the target's choice now and then.
Programs are kept across tests (`jetspec_jax.compiled`), so that tests share shapes and vary what is data.
"""

import contextlib
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import random_module

from jetspec_jax import (
    CheckpointError,
    GenerationConfig,
    chat_prompt,
    generate,
    load_draft_head,
    load_target,
    save_draft_head,
    save_target,
)
from jetspec_jax.config import HeadConfig, TargetConfig
from jetspec_jax.engine import METHODS, bucket, check_prompt, top_two_gap
from jetspec_jax.head import DraftHead
from jetspec_jax.target import TargetModel
from jetspec_jax.text import TextStream
from train.data import Packed
from train.packed import target_forward
from train.tokenizer import train_tokenizer

VOCAB, LIMIT, BLOCK, NEW = 12, 64, 4, 24
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 1e4, "max_position_embeddings": LIMIT,
}  # fmt: skip
HEAD = {"num_hidden_layers": 2, "block_size": BLOCK, "target_layer_ids": (0, 1), "mask_token_id": 11}
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, VOCAB, size).tolist() for size in (1, 3, 7, 12, 16)]
TREE = GenerationConfig(budget=24, tree_width=8, max_new_tokens=NEW)
SAMPLED = GenerationConfig(budget=24, tree_width=8, max_new_tokens=NEW, temperature=0.8, seed=7, batch_size=2)


@pytest.fixture(autouse=True, scope="module")
def _compile_quickly():
    """These tests spend their time compiling; programs optimised less mean the same and compile twice as fast."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


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


def fresh_target(**sizes):
    return random_module(TargetModel, TargetConfig(**{**SIZES, **sizes}, num_hidden_layers=2), 0)


def head_config(**fields):
    return HeadConfig(**{**SIZES, **HEAD, "num_target_layers": 2, "causal_head": True, **fields})


@jax.jit
def all_logits(model, tokens):
    """Next-token logits `[LIMIT, vocab]` at every place, by the training forward: another attention, no cache."""
    row = jnp.arange(LIMIT, dtype=jnp.int32)[None]
    batch = Packed(tokens, row, jnp.ones_like(row), jnp.ones(row.shape, bool))
    return model.logits(target_forward(model, batch).hidden)[0]


def next_logits(model, tokens):
    padded = np.zeros((1, LIMIT), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.array(all_logits(model, padded))[len(tokens) - 1]


def greedy(model, prompt, count):
    """`count` tokens after the prompt, one forward each."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(next_logits(model, tokens).argmax()))
    return tokens[len(prompt) :]


def until(text, eos):
    return text[: text.index(eos) + 1] if eos in text else text


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A target and its head on disk, and the target's greedy texts. Some texts end by the end-of-sequence token."""
    root = tmp_path_factory.mktemp("saved")
    model = fresh_target()
    texts = [greedy(model, prompt, NEW) for prompt in PROMPTS]
    first = {eos: [text.index(eos) for text in texts if eos in text] for eos in range(VOCAB)}
    eos = next(eos for eos, at in first.items() if 0 < len(at) < len(PROMPTS) and max(at) > BLOCK)
    save_target(root / "target", model, eos_token_ids=(eos, eos))
    save_draft_head(root / "head", random_module(DraftHead, head_config(), 1))
    return root, [until(text, eos) for text in texts], eos


@pytest.fixture(scope="module")
def target(saved):
    return load_target(saved[0] / "target")


@pytest.fixture(scope="module")
def head(saved, target):
    return load_draft_head(saved[0] / "head", target)


@pytest.fixture(scope="module")
def sampled(target, head):
    """Results in batches of 2, the last of them short."""
    return generate(target, head, PROMPTS, SAMPLED)


def consistent(result, prompt, config, eos):
    """Whether the fields of a result say the same."""
    count = len(result.token_ids)
    assert result.prompt is None and result.text is None  # ids in, no tokenizer
    assert (result.prompt_tokens, result.budget, result.method) == (len(prompt), config.budget, config.method)
    assert result.rounds == len(result.accepted_lengths)
    assert sum(result.accepted_lengths) + 1 == count == len(result.drafted)
    most = BLOCK if config.method != "ar" else 1
    assert all(1 <= length <= most for length in result.accepted_lengths)
    tau = sum(result.accepted_lengths) / max(result.rounds, 1)
    assert result.mean_accepted_length == pytest.approx(tau)
    assert result.finish_reason == ("stop" if result.token_ids[-1] == eos else "length")
    assert eos not in result.token_ids[:-1]
    assert result.finish_reason == "stop" or count == config.max_new_tokens
    assert result.seconds > 0 and result.tokens_per_second == pytest.approx(count / result.seconds)
    # Of every round but a cut-off last one, all tokens but the last are accepted drafts; prefill's is the target's.
    ends = list(itertools.accumulate(result.accepted_lengths, initial=0))
    own = {0, *ends[:-1]} if len(ends) > 1 else {0}
    assert not any(result.drafted[i] for i in own)
    assert all(result.drafted[i] for i in range(ends[-2] if len(ends) > 1 else 0) if i not in own)


# Results.


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_targets_greedy_text_and_consistent_fields(saved, target, head, method):
    """The text is that of one cache-free forward a token, cut at the end of sequence."""
    _, texts, eos = saved
    options = {"budget": TREE.budget, "tree_width": TREE.tree_width, "max_new_tokens": NEW}
    results = generate(target, head if method != "ar" else None, PROMPTS, method=method, **options)
    assert [result.token_ids for result in results] == texts
    for result, prompt in zip(results, PROMPTS):
        consistent(result, prompt, GenerationConfig(method=method, **options), eos)
    assert {result.finish_reason for result in results} == {"stop", "length"}
    if method == "jetspec":
        assert any(length > 1 for result in results for length in result.accepted_lengths)  # drafts are accepted


def test_a_sampled_text_depends_on_its_seed_and_not_on_its_batch(saved, target, head, sampled):
    """Row i draws with seed + i: alone and plainly, in a batch with drafts, and beside a padding row."""
    alone = generate(target, None, PROMPTS, SAMPLED, method="ar", batch_size=1)
    assert [result.token_ids for result in alone] == [result.token_ids for result in sampled]
    for result, prompt in zip(sampled, PROMPTS, strict=True):
        consistent(result, prompt, SAMPLED, saved[2])
    [third] = generate(target, head, [PROMPTS[3]], SAMPLED, seed=SAMPLED.seed + 3)
    assert third.token_ids == sampled[3].token_ids
    twins = generate(target, head, [PROMPTS[0]] * 2, SAMPLED)
    assert twins[0].token_ids == sampled[0].token_ids != twins[1].token_ids


def test_seeds_may_be_given_one_a_prompt(target, head, sampled):
    """Prompts in another order, each with the seed that it had: the same texts. Their number must fit."""
    order = [2, 0, 1]
    seeds = [SAMPLED.seed + i for i in order]
    moved = generate(target, head, [PROMPTS[i] for i in order], SAMPLED, seeds=seeds)
    assert [result.token_ids for result in moved] == [sampled[i].token_ids for i in order]
    with pytest.raises(ValueError, match="seeds must be one a prompt: 2 for 3 prompts"):
        generate(target, head, PROMPTS[:3], SAMPLED, seeds=seeds[:2])


def test_progress_grows_each_row_by_what_a_round_commits(target, head, sampled):
    """With calls of one round, a row is prefill's token, then extends itself; the last is the result."""
    seen = []
    results = generate(target, head, PROMPTS, SAMPLED, rounds_per_call=1, on_progress=seen.append)
    assert [result.token_ids for result in results] == [result.token_ids for result in sampled]
    for index, result in enumerate(results):
        row = index % 2
        steps = [progress for progress in seen if progress.first == index - row]
        texts = [progress.row(row)[0] for progress in steps]
        drafted = [progress.row(row)[1] for progress in steps]
        lengths = [1, *(1 + total for total in itertools.accumulate(result.accepted_lengths))]
        lengths += [lengths[-1]] * (len(steps) - len(lengths))  # finished while its neighbour goes on
        assert [len(text) for text in texts] == [len(flags) for flags in drafted] == lengths
        assert all(text == result.token_ids[: len(text)] for text in texts)
        assert all(flags == result.drafted[: len(flags)] for flags in drafted)
        assert [progress.rounds[row] for progress in steps] == np.minimum(range(len(steps)), result.rounds).tolist()
        assert steps[-1].finished.all() and not any(progress.finished.all() for progress in steps[:-1])
    assert all(a.seconds <= b.seconds for a, b in itertools.pairwise(seen) if a.first == b.first)
    rows = [{len(x) for x in progress if isinstance(x, np.ndarray)} for progress in seen]
    assert rows == [{min(2, len(PROMPTS) - progress.first)} for progress in seen]  # without those that fill the batch


@pytest.mark.usefixtures("sampled")
def test_nothing_is_compiled_once_warm(target, head):
    """Prompt lengths in a bucket, caps, batch composition, seeds and temperatures are data."""
    with compilations() as found:
        generate(target, head, [PROMPTS[2]], SAMPLED, max_new_tokens=1)
        generate(target, head, [PROMPTS[4], PROMPTS[0], [5]], SAMPLED, max_new_tokens=48, temperature=1.7, seed=3)
        generate(target, head, PROMPTS[::-1], SAMPLED, max_new_tokens=33, min_p=0.1, rounds_per_call=2)
        reloaded = load_target(target.path)
        generate(reloaded, head, PROMPTS[:2], SAMPLED)
    assert found == []
    with compilations() as found:  # the count does count
        jax.jit(lambda x: x * 3)(jnp.ones((3,))).block_until_ready()
    assert len(found) >= 1


def test_no_prompts_give_no_results(target, head):
    assert generate(target, head, []) == []


# Bounds.


@pytest.mark.parametrize("size", [LIMIT - 1, LIMIT])
def test_prompt_and_answer_may_fill_the_models_limit(target, head, size):
    """The text at the limit is still the greedy one."""
    prompt = PROMPTS[4]
    [result] = generate(target, head, [prompt], TREE, max_new_tokens=size - len(prompt))
    want = greedy(target.model, prompt, size - len(prompt))
    assert result.token_ids == until(want, target.eos_token_ids[0])


REFUSED = {
    "empty prompt": ([[1], []], {}, ["prompt 1", "empty"]),
    "over the limit": ([PROMPTS[4]], {"max_new_tokens": 49}, ["prompt 0", "16 tokens", "65", "64"]),
    "far over the limit": ([[1], [2] * 500], {}, ["prompt 1", "500 tokens", "524", "64"]),
    "negative id": ([[1, -1]], {}, ["prompt 0", "id -1", "12"]),
    "id past the vocabulary": ([[12]], {}, ["id 12", "0 to 11"]),
    "text without a tokenizer": (["hello"], {}, ["no tokenizer", "token ids"]),
    "half of a character": (["hi \ud83d there"], {}, ["prompt 0", "half of a character"]),
    "one prompt's ids": ([1, 2, 3], {}, ["prompt 0 is '1'", "list of token ids", "[[1, 2, 3]]"]),
    "messages": ([[{"role": "user", "content": "hi"}]], {}, ["prompt 0 is", "role", "chat_prompt"]),
    "a message": ({"role": "user", "content": "hi"}, {}, ["prompts must be a list", "role"]),
    "a text alone": ("hello", {}, ["prompts must be a list", "hello"]),
    "ids that are no integers": ([[1], [1.5, 2]], {}, ["prompt 1 is", "1.5"]),
    "a negative seed": (PROMPTS, {"seed": -1}, ["seed", "at least 0", "-1"]),
    "seeds that reach too far": (PROMPTS, {"seed": 2**32 - 4}, ["seeds", "4294967295", "4294967296"]),
    "a seed that is no integer": (PROMPTS[:2], {"seeds": [1, 2.5]}, ["seeds must be integers", "2.5"]),
    "a huge seed": (PROMPTS[:1], {"seeds": [2**70]}, ["seeds must be integers", str(2**70)]),
    "budget": (PROMPTS, {"budget": 0}, ["budget", "0"]),
    "a budget that is no integer": (PROMPTS, {"budget": 2.5}, ["budget", "integer", "2.5"]),
    "no max_new_tokens": (PROMPTS, {"max_new_tokens": None}, ["max_new_tokens", "integer", "None"]),
    "tree_width": (PROMPTS, {"tree_width": 0}, ["tree_width"]),
    "max_new_tokens": (PROMPTS, {"max_new_tokens": 0}, ["max_new_tokens"]),
    "batch_size": (PROMPTS, {"batch_size": 0}, ["batch_size"]),
    "method": (PROMPTS, {"method": "beam"}, ["method", "jetspec, chain, ar", "beam"]),
    "temperature": (PROMPTS, {"temperature": -0.5}, ["temperature", "-0.5"]),
    "temperature that is no number": (PROMPTS, {"temperature": float("nan")}, ["temperature"]),
    "top_k": (PROMPTS, {"top_k": -1}, ["top_k"]),
    "top_p": (PROMPTS, {"top_p": 0.0}, ["top_p"]),
    "min_p": (PROMPTS, {"min_p": 1.5}, ["min_p"]),
    "attention": (PROMPTS, {"attention": "flash"}, ["attention", "auto, pallas, xla", "flash"]),
    "attention that cannot serve": (
        PROMPTS,
        {"attention": "pallas", "budget": 600},
        ["head_dim 8", "601 nodes", "xla"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_answered_is_refused_before_anything_is_compiled(target, head, case):
    """One ValueError names what is wrong, and with which value."""
    prompts, options, parts = REFUSED[case]
    with compilations() as found, pytest.raises(ValueError, match=parts[0]) as error:
        generate(target, head, prompts, TREE, **options)
    assert all(part in str(error.value) for part in parts), str(error.value)
    assert found == []


@pytest.mark.parametrize("method", ["jetspec", "chain"])
def test_a_method_that_drafts_needs_a_head(target, method):
    with pytest.raises(ValueError, match=f"{method} needs a draft head.*method ar"):
        generate(target, None, PROMPTS, method=method)


def test_an_unknown_option_is_named(target, head):
    with pytest.raises(TypeError, match="bugdet"):
        generate(target, head, PROMPTS, bugdet=3)


@pytest.mark.parametrize("rounds", [0, -1])
@pytest.mark.usefixtures("sampled")
def test_calls_without_a_round_are_refused(target, head, rounds):
    """They would never end."""
    calls = itertools.count()

    def give_up(progress):
        assert next(calls) < 100, "no round is taken"

    with pytest.raises(ValueError, match="rounds_per_call"):
        generate(target, head, PROMPTS, SAMPLED, rounds_per_call=rounds, on_progress=give_up)


def test_the_limit_is_that_of_prompt_and_answer_together(target):
    """One less and the limit itself pass; one more is an error that names both numbers."""
    for size in (LIMIT - NEW - 1, LIMIT - NEW):
        check_prompt([1] * size, target, NEW, "it")
    with pytest.raises(ValueError, match=r"it has 41 tokens.* 65.* limit of 64"):
        check_prompt([1] * (LIMIT - NEW + 1), target, NEW, "it")


def test_a_head_of_another_target_is_refused_with_all_that_differs(tmp_path, target):
    """Sizes, vocabulary and number of layers, in one message."""
    config = head_config(hidden_size=8, vocab_size=13, num_target_layers=3)
    save_draft_head(tmp_path, random_module(DraftHead, config, 1))
    load_draft_head(tmp_path)
    with pytest.raises(CheckpointError, match="made for another target") as error:
        load_draft_head(tmp_path, target)
    for part in ("hidden_size is 8, the target's is 16", "vocab_size is 13, the target's is 12",
                 "num_target_layers is 3, the target's is 2", str(tmp_path), str(target.path)):  # fmt: skip
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("options", "dtype", "message"),
    [
        ({"hidden_size": 8, "vocab_size": 13}, np.float32, "hidden_size is 8, .*vocab_size is 13, "),
        ({"num_target_layers": 9, "target_layer_ids": (8,)}, np.float32, "num_target_layers is 9, the target's is 2"),
        ({}, jnp.bfloat16, r"dtype is bfloat16, the target's is float32; load_draft_head\(path, target\)"),
    ],
)
def test_a_head_that_was_loaded_by_itself_must_fit_too(target, options, dtype, message):
    """Its sizes, its layers and its dtype are the target's, or nothing is compiled; plain decoding takes any."""
    other = jax.tree.map(lambda x: x.astype(dtype), random_module(DraftHead, head_config(**options), 1))
    with compilations() as found, pytest.raises(ValueError, match=f"does not fit .*{message}"):
        generate(target, other, PROMPTS, TREE)
    assert found == []
    assert generate(target, other, [], TREE, method="ar") == []


def test_buckets_are_few_fit_and_waste_little():
    """Never too small, growing, below twice the size, a quarter more at most above 2048, and whole chunks there."""
    sizes = range(1, 40_961)
    buckets = [bucket(size) for size in sizes]
    assert all(size <= b < 2 * size or size == b == 1 for size, b in zip(sizes, buckets))
    assert all(b <= 1.25 * size for size, b in zip(sizes, buckets) if size > 2048)
    assert all(a <= b for a, b in itertools.pairwise(buckets))
    assert all(b % 512 == 0 for b in buckets if b >= 2048)
    assert all(bucket(b) == b for b in set(buckets))
    assert len(set(buckets)) < 32


def test_a_target_stretched_by_yarn_takes_as_many_tokens_as_it_is_stretched_to():
    """Qwen's recipe leaves `max_position_embeddings` at 40,960. Llama 3's scaling says nothing of the kind."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    base = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 8, "num_hidden_layers": 1, "head_dim": 8, **sizes}
    base["max_position_embeddings"] = 40_960
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    llama = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama["original_max_position_embeddings"] = 8192
    limits = {None: 40_960, "yarn": 131_072, "short": 40_960, "llama3": 40_960}
    for name, scaling in {None: None, "yarn": yarn, "short": yarn | {"factor": 1.0}, "llama3": llama}.items():
        assert TargetConfig.from_hf({**base, "rope_scaling": scaling}).max_tokens == limits[name]
    stretched = types.SimpleNamespace(config=TargetConfig.from_hf({**base, "rope_scaling": yarn}))
    check_prompt([1] * 131_000, stretched, 72, "it")
    with pytest.raises(ValueError, match="limit of 131072"):
        check_prompt([1] * 131_000, stretched, 73, "it")


@pytest.mark.parametrize("size", [1, 11, 16])
def test_the_gap_is_between_the_two_best_logits_of_a_direct_forward(target, size):
    """Whatever the padding: sizes of one bucket share a program."""
    tokens = np.random.default_rng(size).integers(0, VOCAB, size).tolist()
    best = np.sort(next_logits(target.model, tokens))
    assert top_two_gap(target, tokens) == pytest.approx(best[-1] - best[-2], rel=1e-4, abs=1e-5)


# Text.


@functools.cache
def tokenizer():
    return train_tokenizer(["to be or not to be", "that is the question: 12 + 34 = 46"] * 5, 300)


def test_texts_go_in_and_come_out(tmp_path):
    """A text prompt is the tokenizer's ids of it, the result's text their decoding; a prompt of ids comes out None."""
    words = tokenizer()
    save_target(tmp_path, fresh_target(vocab_size=len(words)), eos_token_ids=(2,), tokenizer=words)
    target = load_target(tmp_path)
    text = "to be 12"
    ids = words.encode(text)
    asked, by_ids = generate(target, None, [text], method="ar", max_new_tokens=NEW) + generate(
        target, None, [ids], method="ar", max_new_tokens=NEW
    )
    assert (asked.prompt, by_ids.prompt) == (text, None)
    assert asked.prompt_tokens == len(ids)
    assert asked.token_ids == by_ids.token_ids
    assert asked.text == by_ids.text == words.decode(asked.token_ids, skip_special_tokens=True)
    assert chat_prompt(target, "hi") == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        generate(target, None, [""], method="ar")


def streamed(ids):
    stream = TextStream(tokenizer())
    return [*map(stream.push, ids), stream.finish()]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text())
def test_a_character_over_several_tokens_comes_whole(text):
    """Pieces join to the text, and no piece has a replacement character that the text has not."""
    pieces = streamed(tokenizer().encode(text))
    assert "".join(pieces) == tokenizer().decode(tokenizer().encode(text), skip_special_tokens=True)
    assert "\N{REPLACEMENT CHARACTER}" in text or not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, len(tokenizer()) - 1), max_size=40))
def test_pieces_of_any_tokens_join_to_their_decoding(ids):
    """Broken characters and special tokens included."""
    assert "".join(streamed(ids)) == tokenizer().decode(ids, skip_special_tokens=True)


def test_pieces_appear_as_soon_as_a_character_is_whole_and_the_rest_at_the_end():
    """Here every byte of the text is a token; `finish` gives up on bytes that never became a character."""
    ids = tokenizer().encode("z\N{EURO SIGN}z\N{GRINNING FACE}")
    assert streamed(ids) == ["z", "", "", "\N{EURO SIGN}", "z", "", "", "", "\N{GRINNING FACE}", ""]
    assert streamed(ids[:-1])[-1] == "\N{REPLACEMENT CHARACTER}"
    assert streamed([]) == [""]
