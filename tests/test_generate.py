"""The command: what it prints and where, how it refuses bad input, and the memory plan beside it.

`main` runs in this process on tiny checkpoints on disk. Programs are kept across tests, so that tests share shapes.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh
from tiny import SIZES, head_config, random_module, target_config

import jetspec_jax
import jetspec_jax.engine
from infer.generate import main, read_prompt_file
from infer.plan import large_copies, plan_steps
from infer.plan import main as plan
from jetspec_jax.head import DraftHead
from jetspec_jax.models import EMBEDDED_TARGET
from jetspec_jax.sharding import parse_mesh
from jetspec_jax.target import TargetModel
from jetspec_jax.tree import TreeShape
from train.tokenizer import train_tokenizer

LIMIT = SIZES["max_position_embeddings"]
FIELDS = {
    "prompt", "text", "token_ids", "prompt_tokens", "finish_reason", "rounds", "accepted_lengths",
    "mean_accepted_length", "budget", "method", "seconds", "tokens_per_second",
}  # fmt: skip
TEXTS = ["to be or not to be", "12 + 34"]
SETTINGS = ["--budget", "8", "--tree-width", "2", "--max-new-tokens", "10"]


@pytest.fixture
def _compile_quickly():
    """These tests spend their time compiling; programs optimised less mean the same and compile twice as fast."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def lines(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A target with a tokenizer, its head, a head of another target, a target without a tokenizer; prompt files."""
    root = tmp_path_factory.mktemp("cli")
    words = train_tokenizer(TEXTS * 5, 280)
    target, head = target_config(len(words)), head_config(len(words))
    other = dataclasses.replace(head, hidden_size=8, vocab_size=99, num_target_layers=5)
    model = random_module(TargetModel, target, 0)
    jetspec_jax.save_target(root / "target", model, eos_token_ids=(2,), tokenizer=words)
    jetspec_jax.save_target(root / "bare", model, eos_token_ids=(2,))
    jetspec_jax.save_draft_head(root / "head", random_module(DraftHead, head, 1))
    jetspec_jax.save_draft_head(root / "other", random_module(DraftHead, other, 1))
    (root / "empty").mkdir()
    lines(root / "prompts.jsonl", *({"prompt": text} for text in TEXTS))
    lines(root / "broken.jsonl", {"prompt": "fine"}, "", '{"prompt": ')
    lines(root / "fields.jsonl", {"prompt": "fine"}, {"text": "no prompt"})
    lines(root / "list.jsonl", ["prompt"])
    lines(root / "blank.jsonl", {"prompt": "  "})
    lines(root / "number.jsonl", {"prompt": 7})
    lines(root / "nothing.jsonl")
    lines(root / "long.jsonl", {"prompt": "fine"}, {"prompt": "long " * LIMIT})
    return root


@pytest.fixture
def command(root, capsys, _compile_quickly):
    """Runs the command with the tiny models; gives its exit code, stdout and stderr."""

    def run(*argv, models=("--model", "{root}/target", "--draft-head", "{root}/head"), settings=SETTINGS):
        capsys.readouterr()
        filled = [str(arg).replace("{root}", str(root)) for arg in (*models, *settings, *argv)]
        try:
            code = main([*filled, "--no-compilation-cache"])
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


# Bad input.

IDS = ("--prompt-ids", "5,6,7")
WHOLE = ("--model", "{root}/target", "--draft-head", "{root}/head")
REFUSED = {
    "unknown path": (("--model", "{root}/nowhere", *WHOLE[2:]), IDS, ["nowhere", "not a directory", "config.json"]),
    "unknown head": ((*WHOLE[:3], "{root}/nowhere"), IDS, ["nowhere", "not a directory"]),
    "no config.json": (("--model", "{root}/empty", *WHOLE[2:]), IDS, ["empty/config.json", "does not exist"]),
    "head for another target": (
        (*WHOLE[:3], "{root}/other"), IDS, ["another target", "hidden_size", "vocab_size", "num_target_layers"],
    ),
    "no head": (WHOLE[:2], IDS, ["--draft-head", "--method ar"]),
    "no tokenizer": (("--model", "{root}/bare", *WHOLE[2:]), ("--prompt", "hi"), ["no tokenizer", "--prompt-ids"]),
    "empty prompt": (WHOLE, ("--prompt", ""), ["--prompt is empty"]),
    "blank prompt": (WHOLE, ("--prompt", " \n"), ["--prompt is empty"]),
    "over the limit": (WHOLE, ("--prompt-ids", ",".join("5" * 119)), ["--prompt-ids", "129", "128", "--max-new-tok"]),
    "over the limit in a file": (WHOLE, ("--prompts", "{root}/long.jsonl"), ["long.jsonl: prompt 2", "limit of 128"]),
    "id past the vocabulary": (WHOLE, ("--prompt-ids", "1,9999"), ["--prompt-ids", "9999", "vocabulary"]),
    "negative id": (WHOLE, ("--prompt-ids=-1",), ["--prompt-ids", "-1", "vocabulary"]),
    "ids that are none": (WHOLE, ("--prompt-ids", "1,x"), ["--prompt-ids", "integers", "1,x"]),
    "no ids": (WHOLE, ("--prompt-ids", ""), ["--prompt-ids"]),
    "budget": (WHOLE, (*IDS, "--budget", "0"), ["budget", "at least 1", "0"]),
    "tree width": (WHOLE, (*IDS, "--tree-width", "0"), ["tree_width", "at least 1", "0"]),
    "new tokens": (WHOLE, (*IDS, "--max-new-tokens", "0"), ["max_new_tokens", "at least 1", "0"]),
    "batch size": (WHOLE, (*IDS, "--batch-size", "0"), ["batch_size", "at least 1", "0"]),
    "temperature": (WHOLE, (*IDS, "--temperature", "-1"), ["temperature", "-1"]),
    "top-p": (WHOLE, (*IDS, "--top-p", "0"), ["top_p", "(0, 1]"]),
    "attention": (WHOLE, (*IDS, "--attention", "pallas"), ["no Pallas kernel", "head_dim 8"]),
    "repeats": (WHOLE, (*IDS, "--repeats", "0"), ["--repeats", "at least 1"]),
    "missing file": (WHOLE, ("--prompts", "{root}/missing.jsonl"), ["missing.jsonl", "cannot be read"]),
    "no JSON": (WHOLE, ("--prompts", "{root}/broken.jsonl"), ["broken.jsonl:3: ", '{"prompt": TEXT}']),
    "no prompt": (WHOLE, ("--prompts", "{root}/fields.jsonl"), ["fields.jsonl:2: ", '{"prompt": TEXT}']),
    "no object": (WHOLE, ("--prompts", "{root}/list.jsonl"), ["list.jsonl:1: ", '{"prompt": TEXT}']),
    "blank prompt in a file": (WHOLE, ("--prompts", "{root}/blank.jsonl"), ["blank.jsonl:1: "]),
    "prompt that is no text": (WHOLE, ("--prompts", "{root}/number.jsonl"), ["number.jsonl:1: "]),
    "no prompts": (WHOLE, ("--prompts", "{root}/nothing.jsonl"), ["nothing.jsonl", "no prompts"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(command, case, monkeypatch):
    """The line says what to mend; nothing is on stdout, and no program was compiled, which takes minutes on large
    models."""
    models, argv, parts = REFUSED[case]
    programs = []
    monkeypatch.setattr(jetspec_jax.engine, "compiled", lambda function, *_, **__: programs.append(function))
    code, out, err = command(*argv, models=models)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n")
    assert all(part in err for part in parts), err
    assert programs == []


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (("--budget", "many"), "--budget"),
        (("--method", "beam"), "--method"),
        (("--prompt", "a", "--prompt-ids", "1"), "--prompt"),
        (("--speed", "9"), "--speed"),
    ],
)
def test_what_no_flag_accepts_ends_with_exit_code_2(command, argv, part):
    """The parser's own errors: usage, and a last line that names the flag."""
    code, out, err = command(*argv)
    assert (code, out) == (2, "")
    assert part in err.splitlines()[-1]


def test_a_line_of_a_prompt_file_ends_where_jsonl_says(tmp_path):
    """At a newline alone: JSON texts may hold other separators as they are, and line numbers do not count them."""
    text = "one\N{LINE SEPARATOR}two\N{NEXT LINE}three"
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n\n", encoding="utf-8")
    assert read_prompt_file(path) == [text]
    with path.open("a", encoding="utf-8") as file:
        file.write("oops\n")
    with pytest.raises(ValueError, match=r"prompts\.jsonl:3: not JSON"):
        read_prompt_file(path)


# Output.


def test_json_is_one_object_a_prompt_with_the_documented_fields(root, command):
    """Nothing else is on stdout; the answers are `generate`'s, the prompts as they were given."""
    code, out, err = command("--prompts", "{root}/prompts.jsonl", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and len(rows) == 2
    assert all(set(row) == FIELDS for row in rows)
    assert [row["prompt"] for row in rows] == TEXTS
    assert "error" not in err and "causal head of 1 layers, block 4" in err
    target = jetspec_jax.load_target(root / "target")
    head = jetspec_jax.load_draft_head(root / "head", target)
    prompts = [jetspec_jax.chat_prompt(target, text) for text in TEXTS]
    results = jetspec_jax.generate(target, head, prompts, budget=8, tree_width=2, max_new_tokens=10)
    for row, result in zip(rows, results):
        same = FIELDS - {"prompt", "seconds", "tokens_per_second"}
        assert {name: row[name] for name in same} == {name: getattr(result, name) for name in same}
        assert row["seconds"] > 0
        assert row["tokens_per_second"] == pytest.approx(len(row["token_ids"]) / row["seconds"])


def test_compare_and_verify_add_plain_decoding(command):
    """`--compare` adds "ar" to each object, `--verify-lossless` a count on stderr; all equal is exit code 0."""
    code, out, err = command(
        "--prompts", "{root}/prompts.jsonl", "--json", "--compare", "--repeats", "1", "--verify-lossless"
    )
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and len(rows) == 2
    assert all(set(row) == FIELDS | {"ar"} for row in rows)
    assert all(row["ar"].keys() == {"seconds", "tokens_per_second"} for row in rows)
    assert all(row["method"] == "jetspec" and row["ar"]["seconds"] > 0 for row in rows)
    assert "lossless: 2 of 2 equal plain decoding (float32)" in err


def test_a_divergence_is_located_and_ends_with_exit_code_1(command, monkeypatch):
    """The first differing token of each prompt that has one, both sides of it, and the target's gap there."""
    truth = jetspec_jax.generate

    def spoiled(target, head, prompts, config, **options):
        results = truth(target, head, prompts, config, **options)
        if config.method != "ar" and len(results[0].token_ids) > 2:
            tokens = list(results[0].token_ids)
            tokens[2] += 1
            results[0] = dataclasses.replace(results[0], token_ids=tokens)
        return results

    monkeypatch.setattr(jetspec_jax, "generate", spoiled)
    code, out, err = command("--prompts", "{root}/prompts.jsonl", "--json", "--verify-lossless")
    [row, _] = map(json.loads, out.splitlines())
    changed = row["token_ids"][2]
    assert code == 1
    assert f"prompt 0 diverges at new token 2: [{changed}] instead of [{changed - 1}]" in err
    assert "top-1/top-2 logit gap" in err
    assert "lossless: 1 of 2 equal plain decoding (float32)" in err


def test_a_plain_run_prints_the_text_and_the_table_without_escape_codes(command):
    """Not on a terminal: no colours and no legend. The text is the one that `--json` gives."""
    _, quiet, _ = command("--prompt", TEXTS[0], "--json")
    answer = json.loads(quiet)
    code, out, err = command("--prompt", TEXTS[0])
    assert code == 0
    assert "\033" not in out + err
    assert out.startswith(f"\n> {TEXTS[0]}\n")
    header, figures = out.splitlines()[-3:-1]
    assert header.split() == ["method", "budget", "tokens", "rounds", "tau", "tokens/s", "speed-up"]
    assert figures.split()[:4] == ["jetspec", "8", str(len(answer["token_ids"])), str(answer["rounds"])]
    assert figures.split()[4] == f"{answer['mean_accepted_length']:.2f}"
    assert out.splitlines()[-1].startswith("tau: ")
    assert f"\n> {TEXTS[0]}\n\n{answer['text']}\n\nmethod" in out


def test_plain_decoding_of_ids_needs_neither_head_nor_tokenizer(command):
    """Ids are printed for text; the table has no budget."""
    code, out, _ = command(*IDS, "--method", "ar", models=("--model", "{root}/bare"))
    assert code == 0
    assert out.startswith("\n> 5 6 7\n")
    assert out.splitlines()[-2].split()[:2] == ["ar", "-"]


def test_batched_answers_are_printed_too(command):
    """Not as they come, but all of them, before the table."""
    _, quiet, _ = command("--prompts", "{root}/prompts.jsonl", "--json")
    answers = [json.loads(line)["text"] for line in quiet.splitlines()]
    code, out, _ = command("--prompts", "{root}/prompts.jsonl", "--batch-size", "2")
    assert code == 0
    assert out.startswith("".join(f"\n> {text}\n\n{answer}\n" for text, answer in zip(TEXTS, answers)) + "\nmethod")


def test_the_shipped_target_has_its_head_however_it_is_named(monkeypatch):
    """Here by a path relative to the working directory."""

    def stop(target, head, *_, **__):
        raise RuntimeError(f"head of {head.config.num_target_layers} target layers")

    monkeypatch.chdir(EMBEDDED_TARGET.parent)
    monkeypatch.setattr(jetspec_jax, "generate", stop)
    with pytest.raises(RuntimeError, match="head of"):
        main(["--model", "target", "--prompt-ids", "1", "--json", "--no-compilation-cache"])


def test_without_a_place_for_it_there_is_no_compilation_cache(tmp_path, monkeypatch, caplog):
    """A warning, and generation goes on."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    before = jax.config.jax_compilation_cache_dir
    assert jetspec_jax.enable_compilation_cache() is None
    assert "no compilation cache in" in caplog.text and "XDG_CACHE_HOME" in caplog.text
    assert jax.config.jax_compilation_cache_dir == before


# The memory plan.


def abstract_mesh(sizes):
    shape = parse_mesh(sizes)
    return AbstractMesh(tuple(shape.values()), tuple(shape))


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--budget -1", "--budget must be at least 0, got -1"),
        ("--budget 0 --step draft", "--step draft has nothing to plan"),
        ("--tree-width 0 --step draft", "--tree-width must be at least 1, got 0"),
        ("--batch-size 0", "--batch-size must be at least 1, got 0"),
        ("--context 0", "--context must be at least 1, got 0"),
        ("--search-steps -1", "--search-steps must be at least 0, got -1"),
        ("--parent-rank -1", "--parent-rank must be at least 0, got -1"),
        ("--block-size 1", "block_size"),
        ("--batch-size 3 --mesh data=2", "a batch of 3 cannot be split"),
        ("--budget 600 --attention pallas", "nodes are more than 512"),
    ],
)
def test_a_plan_of_flags_that_cannot_be_is_one_line_and_exit_code_2(flags, part, monkeypatch, capsys):
    """1 is for what does not fit. The mesh is abstract, so that the CUDA plugin is not needed."""
    monkeypatch.setattr("sys.argv", ["plan", *flags.split()])
    monkeypatch.setattr("infer.plan.gpu_devices", lambda *_: [])
    monkeypatch.setattr("infer.plan.make_mesh", lambda sizes, _: abstract_mesh(sizes))
    with pytest.raises(SystemExit) as stop:
        plan()
    captured = capsys.readouterr()
    assert (stop.value.code, captured.out, captured.err.count("\n")) == (2, "", 1)
    assert captured.err.startswith("error: ") and part in captured.err


HLO = """HloModule jit_decode, is_scheduled=true

%body (state: (f32[2,64,8], s32[])) -> (f32[2,64,8], s32[]) {
  %state = (f32[2,64,8]{2,1,0}, s32[]) parameter(0)
  %cache = f32[2,64,8]{2,1,0} get-tuple-element(%state), index=0
  %copy.1 = f32[2,64,8]{2,1,0} copy(%cache), metadata={op_name="jit(decode)/while/body/copy"}
  %copy.2 = bf16[2,64,8]{2,1,0:T(8,128)(2,1)} copy(%half)
  %copy.3 = pred[16]{0} copy(%flags)
  %copy.4 = s32[] copy(%count)
  %copy-start.5 = (f32[512]{0}, f32[512]{0}, u32[]) copy-start(%rows)
  %copy-done.5 = f32[512]{0} copy-done(%copy-start.5)
  %add.6 = f32[4096]{0} add(%copy.1, %copy.1)
  ROOT %tuple = (f32[2,64,8]{2,1,0}, s32[]) tuple(%copy.1, %copy.4)
}

ENTRY %main (argument: f32[2,64,8]) -> f32[2,64,8] {
  %argument = f32[2,64,8]{2,1,0} parameter(0)
  %copy.7 = f32[2,64,8]{2,1,0} copy(%argument)
  ROOT %while = (f32[2,64,8]{2,1,0}, s32[]) while(%tuple), condition=%condition, body=%body
}

%condition (state: (f32[2,64,8], s32[])) -> pred[] {
  ROOT %copy.8 = f32[1024]{0} copy(%x)
}
"""


@pytest.mark.parametrize(
    ("threshold", "found"),
    [
        (4097, []),
        (4096, ["f32[2,64,8]", "f32[1024]"]),
        (2048, ["f32[2,64,8]", "bf16[2,64,8]", "f32[512]", "f32[1024]"]),
        (16, ["f32[2,64,8]", "bf16[2,64,8]", "pred[16]", "f32[512]", "f32[1024]"]),
        (4, ["f32[2,64,8]", "bf16[2,64,8]", "pred[16]", "s32[]", "f32[512]", "f32[1024]"]),
    ],
)
def test_large_copies_are_those_outside_the_entry_from_the_threshold_on(threshold, found):
    """Synchronous and asynchronous ones, each once, in order; other instructions are none."""
    assert large_copies(HLO, threshold) == found


def test_steps_on_this_machine_update_their_state_in_place():
    """All of the state is aliased, no weight or cache array is copied in a loop, and arguments are counted."""
    target, head = target_config(64), head_config(64)
    sizes = {"batch": 2, "capacity": 4096, "device": None, "dtype": jnp.float32}
    plans = plan_steps(target, head, tree=TreeShape(8, 4, 3), **sizes)
    plan = plans["decode"]
    caches = 3 * 2 * (2 * 4096 * 2 * 8) * 4  # layers of target and head, keys and values
    rows = 2 * 4096 * (4 + 4 + 1)  # tokens, token_rounds, drafted
    assert caches + rows < plan.state < caches + rows + 100
    assert plan.aliased == plan.state
    assert plan.copies == plans["prefill"].copies == []
    assert plan.temporaries < plan.state
    counted = jax.eval_shape(lambda: (TargetModel(target, rngs=nnx.Rngs(0)), DraftHead(head, rngs=nnx.Rngs(0))))
    assert plan.weights == sum(4 * leaf.size for leaf in jax.tree.leaves(counted))
    plain = plan_steps(target, None, tree=TreeShape(0, 1, 0), **sizes)["decode"]
    assert plain.aliased == plain.state
    assert plain.copies == []
