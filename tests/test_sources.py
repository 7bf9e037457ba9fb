"""Training reads: conversations in the target's template, texts, token ids. What is wrong is named by its place."""

import dataclasses
import json
import sys
import types

import numpy as np
import pytest

import jetspec_jax
from jetspec_jax.chat import chat_answers, chat_prompt
from jetspec_jax.models import EMBEDDED_TARGET
from train.manifest import DATA, Manifest, model_digest
from train.prompts import answer_order, read_prompts, tokenised
from train.sources import open_documents

# As Qwen3's: the generation prompt of enable_thinking=False closes the thoughts, the history has none, and the last
# answer has empty ones if it has none of its own.
THINKING = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.last and '</think>' not in m.content %}
{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{{- m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""
TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "<hello>"},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4."},
]
GOOD = {"prompt": "hi", "response": "hello"}


@pytest.fixture(scope="module")
def target():
    return jetspec_jax.load_target()


@pytest.fixture
def templated(target):
    """The target with another chat template."""

    def with_template(template):
        tokenizer = jetspec_jax.load_target(EMBEDDED_TARGET).tokenizer
        tokenizer.chat_template = template
        return dataclasses.replace(target, tokenizer=tokenizer)

    return with_template


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def shown(target, document):
    """The text of a document with responses in brackets."""
    text, inside = "", False
    for token, response in zip(document["tokens"].tolist(), document["response"].tolist()):
        text += "[" * (response and not inside) + "]" * (inside and not response) + target.tokenizer.decode([token])
        inside = response
    return text + "]" * inside


def test_all_answers_of_a_conversation_are_learnt_with_their_end_of_turn(target, tmp_path):
    """A document ends with its last answer; an unanswered message behind it is left out."""
    path = write(tmp_path / "chat.jsonl", {"messages": [*TURNS, {"role": "user", "content": "and?"}]})
    [document] = open_documents(path, target)
    assert shown(target, document) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[<hello><|im_end|>]\n"
        "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n[4.<|im_end|>]"
    )
    assert document["tokens"].dtype == np.int32 and document["response"].dtype == bool


def test_fields_without_a_value_do_not_count(target, tmp_path):
    """As tables are written: a file is read as a dataset of the hub is."""
    turns = [{**message, "tool_calls": None} for message in TURNS]
    path = write(tmp_path / "chat.jsonl", {"messages": turns, "text": None}, {"messages": None, **GOOD})
    assert [shown(target, document).count("[") for document in open_documents(path, target)] == [2, 1]


def test_a_document_begins_with_the_tokens_that_decoding_would_read(target, tmp_path):
    """The prompt's tokens are those of `chat_prompt`, and the answer's are encoded by themselves, even where the two
    would merge: the template ends in a line break, and so does the answer begin."""
    path = write(tmp_path / "chat.jsonl", {"prompt": "hi", "response": "\n\nhello"})
    [document] = open_documents(path, target, system="be brief")
    prompt = target.tokenizer.encode(chat_prompt(target, "hi", system="be brief"), add_special_tokens=False)
    answer = target.tokenizer.encode("\n\nhello", add_special_tokens=False)
    assert document["tokens"].tolist() == [*prompt, *answer, target.tokenizer.eos_token_id]
    assert document["response"].tolist() == [False] * len(prompt) + [True] * (len(answer) + 1)


@pytest.mark.parametrize("mode", [None, True, False])
def test_answers_begin_where_the_prompt_of_their_mode_ends(templated, mode):
    """With closed thoughts in the prompt they belong to the prompt; the history has none in any mode."""
    text, spans = chat_answers(templated(THINKING), TURNS, enable_thinking=mode)
    first, last = (text[start:end] for start, end in spans)
    assert first == "<hello><|im_end|>"
    assert last == ("4.<|im_end|>" if mode is False else "<think>\n\n</think>\n\n4.<|im_end|>")
    assert text.endswith(last)
    assert text[: spans[1][0]] == chat_prompt(templated(THINKING), TURNS[:3], enable_thinking=mode)


def test_the_thinking_mode_of_the_data_is_known(templated, tmp_path):
    """As asked, else the template's default; unknown for texts."""
    chat, text = write(tmp_path / "chat.jsonl", GOOD), write(tmp_path / "text.jsonl", {"text": "some"})
    target = templated(THINKING)
    assert open_documents(chat, target, enable_thinking=False).enable_thinking is False
    assert open_documents(chat, target).enable_thinking is True
    assert open_documents(text, target).enable_thinking is None


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{% for m in messages %}{{ m.content }}|{% endfor %}", "ends an assistant's turn with none of .*im_end"),
        ("{% if add_generation_prompt %}?{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}",
         "writes answer 1 unlike the prompt for it"),
        ("{{ raise_exception('no') }}", "refuses the messages: no"),
    ],
)  # fmt: skip
def test_a_template_that_hides_the_answers_is_an_error(templated, template, error):
    with pytest.raises(ValueError, match=error):
        chat_answers(templated(template), TURNS)


def test_without_a_template_prompt_and_answer_stand_side_by_side(templated, tmp_path):
    target = templated(None)
    [document] = open_documents(write(tmp_path / "a.jsonl", GOOD), target)
    assert shown(target, document) == "hi[hello<|im_end|>]"
    with pytest.raises(ValueError, match="no chat template, which messages needs"):
        open_documents(write(tmp_path / "b.jsonl", {"messages": TURNS}), target)


def test_every_token_of_a_text_is_learnt_and_token_ids_are_taken_as_they_are(target, tmp_path):
    """Rows of several kinds may share a file; extra fields do not matter, token ids of an answer among them."""
    rows = (
        {"text": "a b"},
        {"prompt_ids": [7, 8], "token_ids": [9], "index": 3},
        {"prompt_ids": [], "token_ids": [5, 6]},
        {"messages": TURNS[:2], "token_ids": [5, 6]},
    )
    text, ids, bare, chat = open_documents(write(tmp_path / "a.jsonl", *rows), target)
    assert shown(target, text) == "[a b]"
    assert ids["tokens"].tolist() == [7, 8, 9] and ids["response"].tolist() == [False, False, True]
    assert bare["tokens"].tolist() == [5, 6] and bare["response"].all()
    assert shown(target, chat).endswith("[<hello><|im_end|>]")


BAD = {
    "not JSON": "no json",
    "expected one of messages; prompt and response; text; prompt_ids and token_ids; got fields a, b": {"a": 1, "b": 2},
    "expected one of messages.* got .1, 2.": [1, 2],
    "expected one of messages.* got fields text, messages": {"text": "a", "messages": TURNS},
    "text must be a text that is not empty": {"text": " "},
    "response must be a text": {"prompt": "hi", "response": 3},
    "the last message is the user's; it must be the assistant's": {"messages": TURNS[:1]},
    "message 0 has role 'tool'": {"messages": [{"role": "tool", "content": "x"}, TURNS[1]]},
    "messages must be a list": {"messages": "hi"},
    "token_ids must be a list of at least 1": {"prompt_ids": [1], "token_ids": []},
    "token_ids must be a list": {"prompt_ids": [1], "token_ids": 2},
    "expected one of messages.* got fields prompt_ids": {"prompt_ids": [1], "token_ids": None},
    "text and token_ids are an answer without .* train.regenerate": {"prompt": "hi", "text": "ho", "token_ids": [5]},
    "text holds half of a character, .*ud83d": {"text": "abc \ud83d def"},
    "message 1 holds half of a character": {"messages": [TURNS[0], {"role": "assistant", "content": "\ude00"}]},
    "prompt_ids must be integers from 0 to 1023, got .1.5": {"prompt_ids": [1.5], "token_ids": [1]},
    "prompt_ids must be integers": {"prompt_ids": [[1], [1, 2]], "token_ids": [1]},
    "token_ids must be integers from": {"prompt_ids": [1], "token_ids": [1 << 70]},
    "token_ids must be integers from 0 to 1023": {"prompt_ids": [1], "token_ids": [1024]},
    "token_ids must be integers from 0": {"prompt_ids": [1], "token_ids": [-1]},
}


@pytest.mark.parametrize("reason", BAD)
def test_a_malformed_line_is_named_with_its_file_and_line(target, tmp_path, reason):
    """Blank lines count as lines, and as nothing else."""
    path = write(tmp_path / "a.jsonl", GOOD, "", BAD[reason])
    with pytest.raises(ValueError, match=rf"1 of 2 rows are malformed, more than 1%.*a\.jsonl:3: .*{reason}"):
        open_documents(path, target)


@pytest.mark.parametrize("bad", [1, 2, 3])
def test_up_to_one_in_a_hundred_lines_may_be_malformed(target, tmp_path, bad):
    """They are left out, counted and named; one more stops the run."""
    rows = [{"text": f"text {i}"} for i in range(200)]
    rows[10 : 10 + bad] = ["{"] * bad
    path = write(tmp_path / "a.jsonl", *rows)
    if bad > 2:
        with pytest.raises(ValueError, match=r"3 of 200 rows are malformed, more than 1%; .*:11: not JSON.*:13: not"):
            open_documents(path, target)
        return
    documents = open_documents(path, target)
    assert len(documents) == 200 - bad
    [warning] = documents.warnings
    assert f"left out {bad} of 200 rows that are malformed" in warning and "a.jsonl:11: not JSON" in warning
    assert shown(target, documents[10]) == f"[text {10 + bad}]"


def test_the_digest_is_the_datas(target, tmp_path):
    """The same for a copy; another after any change."""
    one, copy, other = (
        open_documents(write(tmp_path / name, {"text": text}), target).digest
        for name, text in (("a.jsonl", "x"), ("b.jsonl", "x"), ("c.jsonl", "y"))
    )
    assert one == copy != other


def test_a_source_that_cannot_be_opened_is_named(target, tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.jsonl cannot be read .*; for a hub dataset write hf:org/name"):
        open_documents(str(tmp_path / "nothing.jsonl"), target)
    with pytest.raises(ValueError, match=r"a\.jsonl holds no rows"):
        open_documents(write(tmp_path / "a.jsonl"), target)
    with pytest.raises(ValueError, match=r"has no manifest\.json; give a directory of train\.regenerate"):
        open_documents(str(tmp_path), target)


def test_a_regenerated_directory_says_its_mode_and_must_be_finished(target, tmp_path):
    """An unfinished one is refused with what to do; another model's is a warning."""
    write(tmp_path / DATA, {"prompt_ids": [1], "token_ids": [2]})
    settings = {"model": target.name, "model_sha256": model_digest(target.path), "enable_thinking": False}
    manifest = Manifest(settings, {})
    manifest.write(tmp_path)
    with pytest.raises(ValueError, match=r"is not finished; run train\.regenerate again .* or give .*data\.jsonl"):
        open_documents(str(tmp_path), target)
    manifest.finished = True
    manifest.write(tmp_path)
    documents = open_documents(str(tmp_path), target)
    assert documents.enable_thinking is False and documents.warnings == () and len(documents) == 1
    other = dataclasses.replace(target, name="other")
    assert open_documents(str(tmp_path), other).warnings == (
        f"{tmp_path} was written by {target.name}, and the target is other",
    )
    Manifest({**settings, "model_sha256": "0"}, {}, finished=True).write(tmp_path)
    [warning] = open_documents(str(tmp_path), target).warnings
    assert f"was written by another {target.name} than {target.path}" in warning
    with pytest.raises(ValueError, match="was regenerated with its own system message"):
        open_documents(str(tmp_path), target, system="x")


# Hugging Face datasets, by a stand-in for the library that knows one dataset.


class Dataset(list):
    _fingerprint = "0123"


@pytest.fixture
def hub(monkeypatch):
    calls = []

    def load_dataset(name, subset, split):
        calls.append((name, subset, split))
        if name != "org/name":
            raise FileNotFoundError(f"no dataset {name}")
        return Dataset([{"messages": None, **GOOD}, {"messages": TURNS, "prompt": None, "response": None}])

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


def test_a_hub_dataset_is_read_by_its_columns(target, hub):
    """Columns without a value do not count; subset and split are passed on."""
    documents = open_documents("hf:org/name::main:train[:2]", target)
    assert documents.digest == "0123"
    assert [shown(target, document).count("[") for document in documents] == [1, 2]
    open_documents("hf:org/name:test", target)
    open_documents("hf:org/name", target)
    assert hub == [("org/name", "main", "train[:2]"), ("org/name", None, "test"), ("org/name", None, "train")]


def test_a_hub_dataset_that_cannot_be_had_is_named(target, hub, monkeypatch):
    with pytest.raises(ValueError, match=r"hf:org/other cannot be loaded \(FileNotFoundError: no dataset org/other\)"):
        open_documents("hf:org/other", target)
    with pytest.raises(ValueError, match="hf::x: expected hf:org/name"):
        open_documents("hf::x", target)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"hf:org/name needs the datasets library: pip install 'jetspec-jax\[d"):
        open_documents("hf:org/name", target)


# Prompts of regeneration.


def test_prompts_are_texts_or_conversations_up_to_the_users_last_message(tmp_path):
    path = write(tmp_path / "a.jsonl", {"prompt": "hi", "response": "x"}, {"messages": TURNS})
    assert read_prompts(path) == (["hi", TURNS[:3]], [])
    path = write(tmp_path / "b.jsonl", {"question": "hi"})
    assert read_prompts(path, "question") == (["hi"], [])


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"question": "hi"}, r"a\.jsonl:1: a row must have prompt or messages \(--prompt-field .*; it has question"),
        ({"prompt": "hi", "messages": TURNS}, r"a\.jsonl:1: .* not both; --prompt-field messages takes"),
        ({"prompt": "\ud83d"}, r"a\.jsonl:1: prompt holds half of a character"),
        ({"prompt": ""}, r"a\.jsonl:1: prompt must be a text that is not empty"),
        ({"messages": [TURNS[1]]}, r"a\.jsonl:1: messages must be a list of at least one message"),
        ([], r"a\.jsonl:1: a row must have .* it is \[\]"),
    ],
)
def test_a_malformed_prompt_is_named(tmp_path, row, error):
    with pytest.raises(ValueError, match=error):
        read_prompts(write(tmp_path / "a.jsonl", row))


def test_problems_are_a_source_of_prompts(tmp_path):
    """Longer lists begin with shorter ones."""
    assert read_prompts("tasks:5")[0] == read_prompts("tasks:9")[0][:5]
    for wrong in ("tasks:", "tasks:0", "tasks:x"):
        with pytest.raises(ValueError, match=f"--prompts {wrong}: expected tasks:N"):
            read_prompts(wrong)


def test_prompts_too_long_to_answer_are_left_out_or_stop_the_run(target):
    """Like malformed rows: up to one in a hundred."""
    prompts = ["hi"] * 99 + ["long " * 3000]
    rows, [warning] = tokenised(target, prompts, "a.jsonl", 8, system=None, enable_thinking=None)
    assert list(rows) == list(range(99))
    assert "left out 1 of 100 rows that are prompts that the target cannot answer: prompt 99 has" in warning
    with pytest.raises(ValueError, match=r"prompt 0 has \d+ tokens, .* over the model's limit of 2048"):
        tokenised(target, prompts[-1:], "a.jsonl", 8, system=None, enable_thinking=None)


def test_prompts_are_answered_in_windows_sorted_by_length():
    """A permutation; windows stay apart, and equal lengths keep their order."""
    lengths = np.random.default_rng(0).integers(1, 5, 50)
    rows = {2 * i: [0] * n for i, n in enumerate(lengths.tolist())}
    order = answer_order(rows, 16)
    assert sorted(order) == list(rows)
    for start in range(0, 50, 16):
        window = order[start : start + 16]
        keys = [(len(rows[i]), i) for i in window.tolist()]
        assert keys == sorted(keys)
        assert set(window) == set(list(rows)[start : start + 16])
