"""The command's prompts: files of texts and conversations, templates and their absence, stop texts, model defaults."""

import json

import pytest
from tiny import head_config, random_module, target_config

import jetspec_jax
from infer.generate import main
from infer.prompts import read_prompt_file, shown
from jetspec_jax.head import DraftHead
from jetspec_jax.target import TargetModel
from train.tokenizer import train_tokenizer

THINKING = """\
{%- for message in messages %}{{- '[' + message.role + ']' + message.content }}{%- endfor %}[assistant]
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{%- endif %}"""
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "he"}]
EXPECTED = 'expected {"prompt": TEXT} or {"messages": '


pytestmark = pytest.mark.usefixtures("compile_quickly")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Targets with and without a thinking template, with sampling defaults, without a tokenizer; heads of two modes."""
    root = tmp_path_factory.mktemp("cli")
    words = train_tokenizer(["to be or not to be"] * 5, 280)
    vocab = len(words)
    model = random_module(TargetModel, target_config(vocab), 0)
    jetspec_jax.save_target(root / "target", model, eos_token_ids=(2,), tokenizer=words)
    jetspec_jax.save_target(root / "bare", model)
    defaults = {"do_sample": True, "temperature": 0.6, "top_k": 5, "top_p": 0.95}
    jetspec_jax.save_target(root / "sampled", model, tokenizer=words)
    (root / "sampled" / "generation_config.json").write_text(json.dumps(defaults))
    words.chat_template = THINKING
    jetspec_jax.save_target(root / "thinking", model, tokenizer=words)
    for name, mode in (("head", None), ("thinks", True), ("answers", False)):
        head = random_module(DraftHead, head_config(vocab, enable_thinking=mode), 1)
        jetspec_jax.save_draft_head(root / name, head)
    return root


@pytest.fixture
def command(root, capsys):
    """Runs the command; gives its exit code, stdout and stderr."""

    def run(*argv, model="target", head="head"):
        capsys.readouterr()
        models = ["--model", str(root / model), "--draft-head", str(root / head), "--no-compilation-cache"]
        try:
            code = main([*models, "--budget", "8", "--tree-width", "2", "--max-new-tokens", "20", *argv])
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


class Asked(Exception):
    """Ends the command where it would decode."""


@pytest.fixture
def asked(command, monkeypatch):
    """The prompts and the config that the command would decode with, and what is on stderr."""

    def run(*argv, **options):
        seen = []

        def stop(target, head, prompts, config, **_):
            seen.append((prompts, config))
            raise Asked

        monkeypatch.setattr(jetspec_jax, "generate", stop)
        errors = []
        monkeypatch.setattr("builtins.print", lambda *args, file=None, **_: errors.append(" ".join(map(str, args))))
        with pytest.raises(Asked):
            command("--json", *argv, **options)
        return *seen[0], "\n".join(errors)

    return run


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# Prompts.


def test_a_file_holds_texts_and_conversations(asked, tmp_path):
    """Both go through the chat template, after the system message."""
    path = lines(tmp_path / "prompts.jsonl", {"prompt": "hi"}, {"messages": TALK})
    prompts, _, _ = asked("--prompts", str(path), "--system", "be brief", model="thinking")
    assert prompts == [
        "[system]be brief[user]hi[assistant]", "[system]be brief[user]hi[assistant]ho[user]he[assistant]",
    ]  # fmt: skip


def test_raw_text_is_read_as_it_is(asked):
    prompts, _, _ = asked("--prompt", "<|im_start|> to be", "--raw")
    assert prompts == ["<|im_start|> to be"]


@pytest.mark.parametrize(("flags", "end"), [((), ""), (("--thinking",), ""), (("--no-thinking",), "<think></think>")])
def test_the_thinking_mode_goes_to_the_template(asked, flags, end):
    prompts, _, _ = asked("--prompt", "hi", *flags, model="thinking")
    assert prompts == [f"[user]hi[assistant]{end}"]


@pytest.mark.parametrize(
    ("head", "flags", "warned"),
    [
        ("thinks", (), False),
        ("thinks", ("--thinking",), False),
        ("thinks", ("--no-thinking",), True),
        ("answers", (), True),
        ("answers", ("--no-thinking",), False),
        ("answers", ("--raw",), False),
        ("head", ("--no-thinking",), False),
    ],
)
def test_a_head_of_the_other_thinking_mode_is_warned_of(asked, head, flags, warned):
    """It drafts worse, and stays lossless. The template's own default counts as a mode."""
    *_, errors = asked("--prompt", "hi", *flags, model="thinking", head=head)
    assert ("warning: the draft head was trained with enable_thinking=" in errors) == warned


ROWS = {
    "neither": ({"text": "hi"}, EXPECTED),
    "both": ({"prompt": "hi", "messages": TALK}, EXPECTED),
    "no list": ({"messages": "hi"}, "list of at least one message"),
    "role": ({"messages": [{"role": "tool", "content": "x"}]}, "role 'tool'"),
    "content": ({"messages": [{"role": "user", "content": ["x"]}]}, "content of type list"),
    "answered": ({"messages": TALK[:2]}, "must be the user's"),
}


@pytest.mark.parametrize("case", ROWS)
def test_a_line_of_a_prompt_file_that_is_wrong_is_named(tmp_path, case):
    row, part = ROWS[case]
    path = lines(tmp_path / "prompts.jsonl", {"messages": TALK}, row)
    with pytest.raises(ValueError, match=r"prompts\.jsonl:2: ") as error:
        read_prompt_file(path)
    assert part in str(error.value)


def test_a_byte_order_mark_before_a_file_is_no_part_of_it(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "hi"}\n', encoding="utf-8-sig")
    assert read_prompt_file(path) == ["hi"]


TEXT, IDS = ("--prompt", "hi"), ("--prompt-ids", "5,6")
REFUSED = {
    "system for raw": ((*TEXT, "--raw", "--system", "x"), {}, ["--raw", "--system"]),
    "system for ids": ((*IDS, "--system", "x"), {}, ["--prompt-ids", "--system"]),
    "thinking for raw": ((*TEXT, "--raw", "--no-thinking"), {}, ["--raw", "--thinking"]),
    "thinking for ids": ((*IDS, "--thinking"), {}, ["--prompt-ids", "--thinking"]),
    "no thinking template": ((*TEXT, "--thinking"), {}, ["--prompt", "no enable_thinking"]),
    "empty stop": ((*TEXT, "--stop", ""), {}, ["stop", "not empty"]),
    "stop without a tokenizer": ((*IDS, "--stop", "x"), {"model": "bare"}, ["--stop", "tokenizer", "bare"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_flags_that_cannot_be_honoured_are_refused(command, case):
    """One line, exit code 2."""
    argv, models, parts = REFUSED[case]
    code, out, err = command(*argv, **models)
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("error: ")
    assert all(part in err for part in parts), err


def test_messages_need_the_template(command, tmp_path):
    path = lines(tmp_path / "prompts.jsonl", {"messages": TALK})
    code, _, err = command("--prompts", str(path), "--raw")
    assert code == 2 and "prompt 1" in err and "--raw" in err


def test_requests_are_shown_as_they_were_given():
    assert [shown("hi"), shown([5, 6])] == ["hi", "5 6"]
    assert shown(TALK) == "user: hi\n> assistant: ho\n> user: he"


# Sampling defaults and stop texts.


@pytest.mark.parametrize(
    ("flags", "want", "told"),
    [
        ((), (0.6, 5, 0.95, 0.0), "temperature 0.6, top_k 5, top_p 0.95 from the model's"),
        (("--temperature", "1"), (1.0, 5, 0.95, 0.0), "sampling: top_k 5, top_p 0.95 from the model's"),
        (("--top-k", "0", "--top-p", "1"), (0.6, 0, 1.0, 0.0), "sampling: temperature 0.6 from the model's"),
        (("--temperature", "0"), (0.0, 5, 0.95, 0.0), None),
        (("--temperature", "1", "--top-k", "0", "--top-p", "1"), (1.0, 0, 1.0, 0.0), None),
    ],
)
def test_the_models_sampling_holds_where_no_flag_says_otherwise(asked, flags, want, told):
    """What came from the model is told; `--temperature 0` is greedy, so that nothing did."""
    _, config, errors = asked(*TEXT, *flags, model="sampled")
    assert (config.temperature, config.top_k, config.top_p, config.min_p) == want
    assert config.sampling.greedy == (want[0] == 0)
    assert (told in errors) if told else ("generation_config" not in errors)


@pytest.mark.parametrize(
    ("flags", "told"),
    [(("--top-k", "3", "--top-p", "0.5"), "temperature 0 is greedy; without effect: --top-k, --top-p"),
     (("--top-k", "0", "--top-p", "1"), None), (("--top-k", "3", "--temperature", "1"), None)],
)  # fmt: skip
def test_filters_that_greedy_decoding_ignores_are_told(asked, flags, told):
    *_, errors = asked(*TEXT, *flags)
    assert (told in errors) if told else ("greedy" not in errors)


def test_without_defaults_of_the_model_decoding_is_greedy(asked):
    _, config, errors = asked(*TEXT)
    assert config.sampling.greedy and "sampling" not in errors


def test_the_command_ends_an_answer_before_a_stop_text(command):
    """Printed and in JSON alike; the stop text here is what the target would have written."""
    _, out, _ = command(*TEXT, "--json")
    answer = json.loads(out)["text"]
    stop = answer[5:8]
    want = answer[: answer.index(stop)]
    code, out, _ = command(*TEXT, "--json", "--stop", "not there", "--stop", stop)
    row = json.loads(out)
    assert (code, row["text"], row["finish_reason"]) == (0, want, "stop")
    code, out, err = command(*TEXT, "--stop", stop, "--verify-lossless")
    assert code == 0 and out.startswith(f"\n> hi\n\n{want}\n\nmethod") and "1 of 1 equal" in err


def test_conversations_come_back_in_json_as_they_were_given(command, tmp_path):
    path = lines(tmp_path / "prompts.jsonl", {"messages": TALK[:1]})
    code, out, _ = command("--prompts", str(path), "--json")
    assert code == 0 and json.loads(out)["prompt"] == TALK[:1]
