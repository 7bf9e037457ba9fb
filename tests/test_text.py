"""Text: streams and stop texts, chat templates and their thinking modes, ids that the tokenizer does not know."""

import dataclasses
import functools
import io
import itertools
import types

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import head_config, random_module, target_config
from tokenizers import Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from infer.display import Printer
from jetspec_jax import (
    GenerationConfig,
    chat_prompt,
    generate,
    load_draft_head,
    load_target,
    save_draft_head,
    save_target,
)
from jetspec_jax.chat import thinking_mode
from jetspec_jax.engine import prompt_ids
from jetspec_jax.head import DraftHead
from jetspec_jax.target import TargetModel
from jetspec_jax.text import TextStream, decode_tokens, decode_until, encode_text
from train.sources import Template
from train.tokenizer import train_tokenizer

PADDING = 20  # ids of the model that the tokenizer does not know
BROKEN = "\N{REPLACEMENT CHARACTER}"


@functools.cache
def tokenizer():
    return train_tokenizer(["abba baab aabb bab", "to be or not to be"] * 5, 290)


# Streams.


def streamed(words, ids, stop):
    """The pieces, and after how many tokens the stream stopped."""
    stream, pieces, count = TextStream(words, stop), [], None
    for index, token in enumerate(ids):
        pieces.append(stream.push(token))
        if stream.stopped and count is None:
            count = index + 1
    return [*pieces, stream.finish()], count


def oracle(words, ids, stop):
    """The same from whole decodings: the shortest beginning that holds a stop text, cut there."""
    for count in range(1, len(ids) + 1):
        text = words.decode(ids[:count], skip_special_tokens=True)
        found = [text.index(s) for s in stop if s in text]
        if found:
            return text[: min(found)], count
    return words.decode(ids, skip_special_tokens=True), None


LETTERS = st.text("ab ", min_size=1, max_size=5)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text("ab ", max_size=40), st.lists(LETTERS, min_size=1, max_size=3))
def test_pieces_join_to_the_text_before_the_stop_text_completed_first(text, stop):
    """The stream stops with the token that completes it, and shows nothing that is cut off later."""
    ids = tokenizer().encode(text)
    pieces, count = streamed(tokenizer(), ids, stop)
    want, stopped = oracle(tokenizer(), ids, stop)
    assert ("".join(pieces), count) == (want, stopped)
    assert all(want.startswith(shown) for shown in itertools.accumulate(pieces))
    assert decode_until(tokenizer(), ids, stop) == (want, stopped is not None)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 400), max_size=30), st.lists(LETTERS, max_size=2))
def test_any_ids_stream_special_broken_and_unknown_ones_included(ids, stop):
    """Joined pieces are the decoding of all, up to a stop text."""
    want, count = oracle(tokenizer(), ids, stop)
    assert decode_until(tokenizer(), ids, stop) == (want, count is not None)


@functools.cache
def spaced():
    """A tokenizer whose decoder drops a space that comes first, as those of Llama 2; ids 0 to 2 are special."""
    words = {word: i for i, word in enumerate(["<s>", "</s>", "<unk>", "<0x41>", "\u2581", "\u2581a", "\u2581b", "c"])}
    made = Tokenizer(BPE(words, [], unk_token="<unk>", byte_fallback=True))
    made.add_special_tokens(["<s>", "</s>", "<unk>"])
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 9), max_size=12), st.lists(LETTERS, max_size=2))
def test_a_space_after_a_token_without_text_is_streamed(ids, stop):
    """Also by decoders that drop a space that comes first: special and unknown tokens do not make it come first."""
    want, count = oracle(spaced(), ids, stop)
    assert decode_until(spaced(), ids, stop) == (want, count is not None)


def test_texts_begin_once_with_the_token_that_begins_texts():
    """Where the tokenizer would add it, and without what it would add behind; other tokenizers add nothing."""
    assert spaced().encode("c")[-1] == 1
    plain = spaced().encode("c", add_special_tokens=False)
    assert encode_text(spaced(), "c") == [0, *plain]
    assert encode_text(spaced(), "<s>c") == spaced().encode("<s>c", add_special_tokens=False)
    target = types.SimpleNamespace(tokenizer=spaced())
    assert prompt_ids(target, "c") == Template(target).document({"text": "c"})["tokens"].tolist() == [0, *plain]
    assert encode_text(tokenizer(), "to be") == tokenizer().encode("to be", add_special_tokens=False)


def test_text_is_held_back_only_while_it_may_begin_a_stop_text():
    """Here every character is a token."""
    words = train_tokenizer(["x"], 260)
    assert streamed(words, words.encode("a<b</s>c"), ["</s>"]) == (["a", "", "<b", "", "", "", "", "", ""], 7)
    assert streamed(words, words.encode("a</"), ["</s>"]) == (["a", "", "", "</"], None)
    assert streamed(words, words.encode("ababc"), ["abc"]) == (["", "", "ab", "", "", ""], 5)


def test_a_token_that_ends_a_stop_text_and_begins_a_character_stops_the_stream():
    """What comes before an incomplete character is text already."""
    words = train_tokenizer(["a\N{LATIN SMALL LETTER E WITH ACUTE}", "a\N{LATIN SMALL LETTER E WITH GRAVE}"] * 5, 261)
    ids = words.encode("a\N{LATIN SMALL LETTER E WITH GRAVE}")
    assert words.decode(ids[:1]) == f"a{BROKEN}"
    assert streamed(words, ids, ["a"]) == (["", "", ""], 1)
    assert streamed(words, ids, []) == (["a", "\N{LATIN SMALL LETTER E WITH GRAVE}", ""], None)
    assert streamed(words, ids[:1], []) == (["a", BROKEN], None)


def test_spaces_stay_where_the_tokens_have_them(monkeypatch):
    """A tokenizer may be set to clean up its decoding; text already shown cannot be."""
    words = train_tokenizer(["x"], 260)
    monkeypatch.setattr(words, "clean_up_tokenization_spaces", True)
    pieces, _ = streamed(words, words.encode("a . b"), [])
    assert "".join(pieces) == decode_tokens(words, words.encode("a . b")) == "a . b"


def test_unknown_ids_have_no_text():
    """Not even inside a character."""
    first, *rest = tokenizer().encode("\N{EURO SIGN}")
    assert rest
    pieces, _ = streamed(tokenizer(), [9999, first, 5000, *rest, 2**31 - 1], [])
    assert "".join(pieces) == "\N{EURO SIGN}" and BROKEN not in "".join(pieces)


# Stop texts while decoding.

CONFIG = GenerationConfig(budget=8, tree_width=2, max_new_tokens=40, batch_size=3)
PLAIN = dataclasses.replace(CONFIG, method="ar", batch_size=1)
PROMPTS = [[5, 6, 7], [40, 41], [8]]


@pytest.fixture(autouse=True, scope="module")
def _compile_quickly():
    """These tests spend their time compiling; programs optimised less mean the same and compile twice as fast."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target that writes letters and unknown ids, and a random head, whose drafts are accepted now and then."""
    root = tmp_path_factory.mktemp("models")
    vocab = len(tokenizer()) + PADDING
    model = random_module(TargetModel, target_config(vocab), 0)
    dull = [i for i in range(len(tokenizer())) if tokenizer().decode([i]).strip("abenort ")]
    words = model.lm_head.weight[...] * 4
    model.lm_head.weight[...] = words.at[np.asarray(dull)].set(0.0)
    save_target(root / "target", model, eos_token_ids=(2,), tokenizer=tokenizer())
    save_draft_head(root / "head", random_module(DraftHead, head_config(vocab), 2))
    target = load_target(root / "target")
    return target, load_draft_head(root / "head", target)


@pytest.fixture(scope="module")
def whole(models):
    """The answers without stop texts."""
    return generate(*models, PROMPTS, CONFIG)


@pytest.fixture(scope="module")
def stop(whole):
    """Stop texts that end two of the rows early, one of them over several tokens, and leave the third."""
    first, second, third = (result.text for result in whole)
    inside = {first[i : i + 4] for i in range(4, len(first) - 8)} - {third[i : i + 4] for i in range(len(third))}
    other = {second[i : i + 3] for i in range(6, len(second) - 8)} - {third[i : i + 3] for i in range(len(third))}
    return min(inside), min(other)


def test_ids_beyond_the_tokenizers_vocabulary_are_decoded_and_have_no_text(models, whole):
    """The target writes them; text and streaming go on."""
    known = len(tokenizer())
    assert any(token >= known for result in whole for token in result.token_ids)
    for result in whole:
        assert result.text == tokenizer().decode([token for token in result.token_ids if token < known])


@pytest.mark.parametrize("rounds", [None, 1, 3])
def test_a_stop_text_ends_its_row_whatever_the_rounds_between_looks(models, whole, stop, rounds):
    """Tokens up to the one that completes it, statistics of those, the text before it; other rows go on."""
    results = generate(*models, PROMPTS, CONFIG, stop=stop, rounds_per_call=rounds)
    for result, full in zip(results, whole):
        text, count = oracle(tokenizer(), full.token_ids, stop)
        assert (result.text, result.token_ids) == (text, full.token_ids[:count])
        assert result.finish_reason == ("length" if count is None else "stop")
        assert result.drafted == full.drafted[:count]
        assert sum(result.accepted_lengths) + 1 == len(result.token_ids)
        assert result.rounds == len(result.accepted_lengths) <= full.rounds
        assert result.accepted_lengths[:-1] == full.accepted_lengths[: max(result.rounds - 1, 0)]
        assert count is None or result.accepted_lengths[-1] <= full.accepted_lengths[result.rounds - 1]
    assert [result.finish_reason for result in results] == ["stop", "stop", "length"]


def test_the_method_and_the_batch_change_nothing(models, stop):
    drafted = generate(*models, PROMPTS, CONFIG, stop=stop)
    assert any(length > 1 for result in drafted for length in result.accepted_lengths)
    plain = generate(*models, PROMPTS, PLAIN, stop=stop)
    assert [(r.token_ids, r.text, r.finish_reason) for r in plain] == [
        (r.token_ids, r.text, r.finish_reason) for r in drafted
    ]


def test_a_stop_text_ends_its_row_inside_an_accepted_block(models, whole):
    """Tokens of the block behind it are neither emitted nor counted. The stop text is all text up to a token."""
    full, known = whole[0], len(tokenizer())
    assert any(length > 2 for length in full.accepted_lengths)
    by_round = [0] + [i + 1 for i, length in enumerate(full.accepted_lengths) for _ in range(length)]
    for count in range(1, len(full.token_ids) + 1):
        if full.token_ids[count - 1] >= known or full.accepted_lengths[max(by_round[count - 1] - 1, 0)] == 1:
            continue
        text = tokenizer().decode(full.token_ids[:count])
        [result] = generate(*models, PROMPTS[:1], CONFIG, stop=[text])
        assert (result.text, result.token_ids, result.finish_reason) == ("", full.token_ids[:count], "stop")
        assert result.rounds == by_round[count - 1]
        assert result.accepted_lengths == [by_round[:count].count(i + 1) for i in range(result.rounds)]


def test_a_stop_text_at_the_cap_wins_over_it(models, whole, stop):
    """As an end-of-sequence token does."""
    count = len(generate(*models, PROMPTS[:1], PLAIN, stop=stop)[0].token_ids)
    [result] = generate(*models, PROMPTS[:1], PLAIN, stop=stop, max_new_tokens=count)
    assert (result.finish_reason, len(result.token_ids)) == ("stop", count)


@pytest.mark.parametrize("rounds", [1, 3])
def test_printed_pieces_join_to_the_text(models, whole, stop, rounds):
    """Nothing of or after the stop text is printed, and rows never shrink."""
    for index, texts in itertools.product(range(3), [(), stop]):
        file, sizes = io.StringIO(), []
        printer = Printer(tokenizer(), file, stop=texts)

        def show(progress, printer=printer, sizes=sizes):
            sizes.append(len(progress.row(0)[0]))
            printer.update(progress)

        options = {"stop": texts, "rounds_per_call": rounds, "on_progress": show}
        [result] = generate(*models, [PROMPTS[index]], PLAIN, **options)
        assert file.getvalue() == result.text + "\n"
        assert sizes == sorted(sizes) and sizes[-1] == len(result.token_ids)


@pytest.mark.parametrize("texts", ["", [""], [7], 7])
def test_stop_texts_that_are_none_are_refused(texts):
    with pytest.raises(ValueError, match="stop must be texts that are not empty"):
        GenerationConfig(stop=texts)


def test_a_stop_text_alone_is_the_only_one_and_none_is_no_text():
    assert GenerationConfig(stop="abc").stop == ("abc",)
    assert GenerationConfig(stop=None).stop == ()


def test_stop_texts_need_a_tokenizer(models, tmp_path):
    save_target(tmp_path, models[0].model)
    with pytest.raises(ValueError, match="no tokenizer, which stop texts need"):
        generate(load_target(tmp_path), None, PROMPTS, CONFIG, method="ar", stop=["a"])


# Chat templates.

THINKING = """\
{%- for message in messages %}{{- '[' + message.role + ']' + message.content }}{%- endfor %}
{%- if add_generation_prompt %}{{- '[assistant]' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}
{%- endif %}"""


@pytest.fixture
def template(models, monkeypatch):
    """Sets the template of the models' tokenizer."""
    return lambda text: monkeypatch.setattr(models[0].tokenizer, "chat_template", text)


def test_a_system_message_goes_before_the_others(models):
    """A text and a conversation of it are the same prompt."""
    target = models[0]
    want = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    messages = [{"role": "user", "content": "hi"}]
    assert chat_prompt(target, "hi", system="be brief") == chat_prompt(target, messages, system="be brief") == want
    assert chat_prompt(target, [{"role": "system", "content": "be brief"}, *messages]) == want
    turns = [*messages, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "he"}]
    assert chat_prompt(target, turns).count("<|im_start|>") == 4
    with pytest.raises(ValueError, match="not both"):
        chat_prompt(target, [{"role": "system", "content": "be brief"}, *messages], system="be long")


USER = {"role": "user", "content": "hi"}
MALFORMED = {
    "no messages": ([], "at least one"),
    "a text": (["hi"], "message 0 must be"),
    "no content": ([{"role": "user"}], "message 0 must be"),
    "more than that": ([{**USER, "name": "x"}], "message 0 must be"),
    "unknown role": ([{**USER, "role": "tool"}], "'tool', expected one of system, user, assistant"),
    "no text": ([{"role": "user", "content": 7}], "content of type int"),
    "late system": ([USER, {"role": "system", "content": "x"}, USER], "message 1 is a system message"),
    "answered": ([USER, {"role": "assistant", "content": "x"}], "must be the user's"),
    "empty": ([{"role": "user", "content": " "}], "empty"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_messages_are_refused(models, case):
    messages, part = MALFORMED[case]
    with pytest.raises(ValueError, match=part):
        chat_prompt(models[0], messages)


def test_thinking_is_passed_on_only_when_it_is_asked_for(models, template):
    """The template tells undefined from true."""
    target = models[0]
    template("{{- enable_thinking is defined }}{%- if enable_thinking %}{{- '!' }}{%- endif %}")
    assert chat_prompt(target, "hi") == "False"
    assert chat_prompt(target, "hi", enable_thinking=True) == "True!"
    assert chat_prompt(target, "hi", enable_thinking=False) == "True"


def test_a_template_without_thinking_refuses_it(models):
    for mode in (True, False):
        with pytest.raises(ValueError, match="has no enable_thinking"):
            chat_prompt(models[0], "hi", enable_thinking=mode)


def test_the_mode_of_prompts_is_the_one_asked_for_or_the_templates_default(models, template):
    target = models[0]
    assert thinking_mode(target, None) is None
    template(THINKING)
    assert [thinking_mode(target, mode) for mode in (None, True, False)] == [True, True, False]
    template(THINKING.replace("enable_thinking is defined and enable_thinking is false", "not enable_thinking"))
    assert thinking_mode(target, None) is False


def test_what_a_template_refuses_is_reported(models, template):
    template("{{- raise_exception('no such luck') }}")
    with pytest.raises(ValueError, match="refuses the messages: no such luck"):
        chat_prompt(models[0], "hi")


def test_of_several_templates_the_default_is_taken(models, template):
    template({"default": THINKING, "other": "x"})
    assert chat_prompt(models[0], "hi", enable_thinking=False) == "[user]hi[assistant]<think></think>"


def test_without_a_template_a_text_is_itself_and_the_rest_is_refused(models, template):
    template(None)
    assert chat_prompt(models[0], "hi") == "hi"
    for prompt, options, name in (
        ([USER], {}, "messages"),
        ("hi", {"system": "x"}, "system"),
        ("hi", {"enable_thinking": False}, "enable_thinking"),
    ):
        with pytest.raises(ValueError, match=f"no chat template, which {name} needs"):
            chat_prompt(models[0], prompt, **options)
