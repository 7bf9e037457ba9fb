"""Properties of the practice problems and of the tokenizer trained on them."""

import json
import operator
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import FrozenInstanceError, replace
from itertools import islice
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # wherever pytest starts, and installed or not

from train.tasks import KINDS, held_out, problems, solved
from train.tokenizer import SPECIAL_TOKENS, train_tokenizer

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def key(problem):
    return problem.kind, problem.template, problem.numbers


@pytest.fixture(scope="module")
def train():
    return list(islice(problems(1, split="train"), 5000))


@pytest.fixture(scope="module")
def unseen():
    return list(islice(problems(1, split="held_out"), 5000))


@pytest.fixture(scope="module")
def tokenizer(train):
    return train_tokenizer(text for p in train[:2000] for text in (p.prompt, p.answer))


def test_same_seed_same_problems_and_other_seed_others(train):
    assert list(islice(problems(1, split="train"), 300)) == train[:300]
    for other in (2, -1):
        assert list(islice(problems(other, split="train"), 300)) != train[:300]


def test_same_problems_in_another_process(train):
    code = "from train.tasks import problems; p = problems(1, split='train');print([next(p).answer for _ in range(50)])"
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == str([p.answer for p in train[:50]]), done.stderr


def test_splits_share_no_key(train, unseen):
    assert not any(map(held_out, train))
    assert all(map(held_out, unseen))
    assert not set(map(key, train)) & set(map(key, unseen))


def test_both_splits_cover_every_template_and_kind(train, unseen):
    templates = {(p.kind, p.template) for p in train}
    assert templates == {(p.kind, p.template) for p in unseen}
    counts = Counter(kind for kind, _ in templates)
    assert counts["word"] >= 24 and counts["code"] >= 16 and counts["json"] >= 10
    for sample in (train, unseen):
        shares = Counter(p.kind for p in sample)
        for kind, share in zip(KINDS, (0.5, 0.25, 0.25)):
            assert abs(shares[kind] / len(sample) - share) < 0.03
    assert {p.kind for p in islice(problems(0, split="train", kinds=["json"]), 50)} == {"json"}


def test_held_out_share_is_near_five_percent(train):
    # Random keys of the same form, as neither split can show the share.
    keys = [replace(train[0], numbers=(a, b)) for a in range(100) for b in range(100)]
    assert 0.04 < mean(map(held_out, keys)) < 0.06


def test_prompt_determines_answer(train, unseen):
    answers = {}
    for problem in train + unseen:
        assert answers.setdefault(problem.prompt, problem.answer) == problem.answer
        assert (problem.prompt + problem.answer).isascii()
        assert not re.search(r"[{}]", problem.prompt)
        assert problem.kind == "json" or not re.search(r"[{}$]", problem.answer)
    with pytest.raises(FrozenInstanceError):
        train[0].kind = "code"


def test_canonical_answer_solves_and_changed_answer_does_not(train):
    for problem in train:
        assert solved(problem, f"\n{problem.answer}\n")
        assert not solved(problem, "")
        assert not solved(problem, problem.answer[: len(problem.answer) // 2])
        last = re.findall(r"\d", problem.answer)
        if last:
            at = problem.answer.rindex(last[-1])
            digit = str((int(last[-1]) + 1) % 10)
            assert not solved(problem, problem.answer[:at] + digit + problem.answer[at + 1 :])


def test_solved_reads_the_final_number_only(train):
    word = next(p for p in train if p.kind == "word")
    number = word.answer.split()[-1].rstrip(".")
    assert solved(word, f"Short. The answer is {number}")
    for wrong in (f"{number}.", f"The answer is {number}0.", f"The answer is {number}.5"):
        assert not solved(word, wrong)


def test_solved_compares_json_by_value(train):
    record = next(p for p in train if p.template == "game")
    value = json.loads(record.answer)
    assert solved(record, json.dumps(dict(reversed(value.items()))))
    value["players"][0]["points"] = float(value["players"][0]["points"])
    assert not solved(record, json.dumps(value))
    assert not solved(record, "[" * 100_000)


def test_word_arithmetic_is_right_and_small(train, unseen):
    for problem in train + unseen:
        if problem.kind != "word":
            continue
        equations = re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", problem.answer)
        assert len(equations) >= 2 and len(equations) == problem.answer.count("=")
        for a, op, b, result in equations:
            assert OPERATIONS[op](int(a), int(b)) == int(result) and 0 < int(result) < 1000
        assert problem.answer.endswith(f"The answer is {equations[-1][3]}.")
        assert all(str(number) in problem.prompt for number in problem.numbers)
        assert not re.search(r"\b1 [a-z]+s\b", problem.answer)


def test_code_runs_and_its_examples_hold(train):
    for problem in train:
        if problem.kind != "code":
            continue
        scope = {}
        exec(problem.answer, scope)
        examples = re.findall(r"^# (\w+\(.*\) == .*)$", problem.answer, re.MULTILINE)
        assert len(examples) == 2
        assert all(eval(example, scope) is True for example in examples)
        name = examples[0].split("(")[0]
        assert f"{name}(" in problem.prompt and scope[name].__doc__


def test_json_parses_to_the_facts(train):
    for problem in train:
        if problem.kind != "json":
            continue
        value = json.loads(problem.answer)
        assert value["type"] == problem.template and problem.prompt.startswith(value["text"])
        one_line = problem.prompt.endswith("on one line.")
        assert problem.answer == json.dumps(value, indent=None if one_line else 2)
        without_text = json.dumps({k: v for k, v in value.items() if k != "text"})
        # Some facts, as the city of an order, are in the text only.
        assert sum(str(v) in without_text for v in problem.numbers) >= len(problem.numbers) - 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"seed": "1", "split": "train"}, "seed"),
        ({"seed": True, "split": "train"}, "seed"),
        ({"seed": 1, "split": "test"}, "split"),
        ({"seed": 1, "split": "train", "kinds": ()}, "kinds"),
        ({"seed": 1, "split": "train", "kinds": "word"}, "kinds"),
        ({"seed": 1, "split": "train", "kinds": ("poem",)}, "kinds"),
    ],
)
def test_bad_arguments_are_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        problems(**arguments)


def test_bad_kind_and_tokenizer_arguments_are_named(train):
    with pytest.raises(ValueError, match="kind"):
        solved(replace(train[0], kind="poem"), "")
    with pytest.raises(ValueError, match="texts"):
        train_tokenizer("one text")
    with pytest.raises(ValueError, match="vocab_size"):
        train_tokenizer(["a"], vocab_size=100)


def test_tokenizer_round_trip_and_single_digits(tokenizer, train):
    assert len(tokenizer) == 1024
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id) == (0, 2, 3)
    odd = ["", " ", "a  b\r\n\tc", "12½ ² 3x45", "\x00\x7f", "é漢字🙂", "x .  y ' s <|im_end|>"]
    for text in odd + [p.answer for p in train[:200]]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    multi = [t for t in tokenizer.get_vocab() if len(t) > 1 and re.search(r"[0-9]", t)]
    assert multi == []


def test_answer_lengths(tokenizer, train):
    for kind, low, high in (("word", 105, 135), ("code", 95, 120), ("json", 85, 110)):
        sample = [p for p in train[2000:3000] if p.kind == kind]
        answers = [len(ids) for ids in tokenizer([p.answer for p in sample])["input_ids"]]
        prompts = [len(ids) for ids in tokenizer([p.prompt for p in sample])["input_ids"]]
        assert low < mean(answers) < high and max(answers) <= 170
        assert min(prompts) >= 20 and max(prompts) <= 70


def test_saved_tokenizer_loads(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json"} <= names
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.all_special_ids == tokenizer.all_special_ids
    assert loaded.encode("f(3, 14) == 17") == tokenizer.encode("f(3, 14) == 17")
    assert loaded.chat_template == tokenizer.chat_template


def test_chat_template(tokenizer):
    jinja2 = pytest.importorskip("jinja2")
    user = {"role": "user", "content": "Hi"}
    system = {"role": "system", "content": "Be brief."}

    def render(*messages, **options):
        return tokenizer.apply_chat_template(list(messages), tokenize=False, **options)

    assert render(user) == "<|im_start|>user\nHi<|im_end|>\n"
    assert render(system, user, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    for bad in ((user, system), ({"role": "tool", "content": "x"},), (user | {"name": "x"},)):
        with pytest.raises(jinja2.TemplateError):
            render(*bad)
    with pytest.raises(jinja2.TemplateError):
        render(user, tools=[{"type": "function", "function": {"name": "f"}}])
