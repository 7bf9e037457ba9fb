"""Regenerated data is the target's own text, and a run that was killed leaves, once resumed, the files of any other.

A tiny random target answers a few problems, up to a few tokens each.
"""

import io
import json

import jax
import pytest
from tiny import head_config, random_module, target_config

import jetspec_jax
from jetspec_jax.head import DraftHead
from jetspec_jax.models import EMBEDDED_TARGET
from jetspec_jax.target import TargetModel
from train import regenerate as command
from train.manifest import DATA, MANIFEST, Manifest
from train.sources import open_documents

COUNT, BATCH, NEW, VOCAB = 10, 4, 12, 1024
SAMPLED = ("--temperature", 1.5, "--seed", 3)
FLAGS = ("--prompts", f"tasks:{COUNT}", "--max-new-tokens", NEW, "--batch-size", BATCH, "--no-compilation-cache")


@pytest.fixture(autouse=True, scope="module")
def _compile_quickly():
    """Programs optimised less mean the same and compile faster."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The directory of a target (with the embedded one's tokenizer) and a head; both have random weights."""
    path = tmp_path_factory.mktemp("models")
    tokenizer = jetspec_jax.load_target(EMBEDDED_TARGET).tokenizer
    model = random_module(TargetModel, target_config(VOCAB), 0)
    jetspec_jax.save_target(path / "target", model, eos_token_ids=(tokenizer.eos_token_id,), tokenizer=tokenizer)
    jetspec_jax.save_draft_head(path / "head", random_module(DraftHead, head_config(VOCAB), 1))
    return path


@pytest.fixture(scope="module")
def run(models):
    """The command with `FLAGS`, an output directory and further flags, of which later ones win; gives its exit code."""
    return lambda out, *flags: command.main(
        [str(flag) for flag in ("--model", models / "target", *FLAGS, "--out", out, *flags)]
    )


@pytest.fixture(scope="module")
def target(models):
    return jetspec_jax.load_target(models / "target")


def rows_of(out):
    return [json.loads(line) for line in (out / DATA).read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    """The directory of an uninterrupted sampled run."""
    out = tmp_path_factory.mktemp("whole")
    assert run(out, *SAMPLED) == 0
    return out


def test_every_prompt_has_the_targets_answer_once(whole, target):
    """Ids, text and reason are those of `generate` for that prompt alone, drawn with seed + index."""
    rows = sorted(rows_of(whole), key=lambda row: row["index"])
    assert [row["index"] for row in rows] == list(range(COUNT))
    for row in (rows[0], rows[7]):
        [alone] = jetspec_jax.generate(
            target, None, [row["prompt_ids"]], method="ar", temperature=1.5, seed=3 + row["index"], max_new_tokens=NEW
        )
        assert row["token_ids"] == alone.token_ids
        assert (row["answer"], row["finish_reason"]) == (alone.text, alone.finish_reason)


def test_the_manifest_says_what_was_done(whole):
    manifest = Manifest.read(whole)
    rows = rows_of(whole)
    assert manifest.finished
    assert manifest.counts == {
        "answers": COUNT,
        "tokens": sum(len(row["token_ids"]) for row in rows),
        "ended": sum(row["finish_reason"] == "stop" for row in rows),
        "cut": sum(row["finish_reason"] == "length" for row in rows),
        "left_out": 0,
    }
    settings = manifest.settings
    assert (settings["model"], settings["revision"], settings["dtype"]) == ("target", None, "float32")
    assert (settings["temperature"], settings["seed"], settings["max_new_tokens"]) == (1.5, 3, NEW)
    assert manifest.run["prompts"] == f"tasks:{COUNT}" and manifest.run["draft_head"] is None


def test_distillation_reads_the_directory(whole, target):
    documents = open_documents(str(whole), target)
    assert len(documents) == COUNT and documents.warnings == ()
    for row, document in zip(rows_of(whole), documents):
        assert document["tokens"].tolist() == row["prompt_ids"] + row["token_ids"]
        assert document["response"].sum() == len(row["token_ids"])


def test_a_head_changes_no_answer(whole, tmp_path, run, models):
    """Speculative decoding of the sampled run: the same file."""
    assert run(tmp_path, *SAMPLED, "--draft-head", models / "head") == 0
    assert (tmp_path / DATA).read_bytes() == (whole / DATA).read_bytes()
    assert Manifest.read(tmp_path).run["method"] == "jetspec"


@pytest.mark.parametrize("answers", [0, 1, 3, 4, 6, 9, 10])
@pytest.mark.parametrize("torn", [False, True])
def test_a_killed_run_goes_on_to_the_same_files(whole, tmp_path, run, answers, torn):
    """Killed after some answers were written, the next one perhaps in part: whole batches are kept, the rest is
    answered again, and the files equal those of the uninterrupted run."""
    lines = (whole / DATA).read_bytes().splitlines(keepends=True)
    manifest = Manifest.read(whole)
    manifest.finished, manifest.counts = False, {}
    manifest.write(tmp_path)
    part = lines[answers][: len(lines[answers]) // 2] if torn and answers < COUNT else b""
    (tmp_path / DATA).write_bytes(b"".join(lines[:answers]) + part)
    calls = []
    original = jetspec_jax.generate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jetspec_jax, "generate", lambda *a, **k: calls.append(len(a[2])) or original(*a, **k))
        assert run(tmp_path, *SAMPLED) == 0
    kept = answers if answers == COUNT else answers // BATCH * BATCH
    assert sum(calls) == COUNT - kept
    for name in (DATA, MANIFEST):
        assert (tmp_path / name).read_bytes() == (whole / name).read_bytes()


def test_a_run_that_breaks_off_leaves_whole_batches_and_an_unfinished_manifest(whole, tmp_path, run, monkeypatch):
    """The manifest is there before the first answer; Ctrl-C in the second batch says how to go on."""
    original, calls = jetspec_jax.generate, []

    def second_fails(*args, **options):
        assert not Manifest.read(tmp_path).finished
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args, **options)

    monkeypatch.setattr(jetspec_jax, "generate", second_fails)
    assert run(tmp_path, *SAMPLED) == 130
    assert rows_of(tmp_path) == rows_of(whole)[:BATCH]
    monkeypatch.setattr(jetspec_jax, "generate", original)
    assert run(tmp_path, *SAMPLED, "--batch-size", 3) == 0
    assert rows_of(tmp_path) == rows_of(whole)


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (("--seed", 4), "seed was 3 and is now 4"),
        (("--temperature", 0), "temperature was 1.5 and is now 0.0"),
        (("--top-p", 0.9), "top_p was 1.0 and is now 0.9"),
        (("--top-k", 5), "top_k was 0 and is now 5"),
        (("--max-new-tokens", 13), "max_new_tokens was 12 and is now 13"),
        (("--system", "be brief"), "system was None and is now 'be brief'"),
        (("--prompts", "tasks:11"), "prompts_sha256 was "),
        (("--dtype", "bfloat16"), "dtype was 'float32' and is now 'bfloat16'"),
    ],
)
def test_other_settings_are_refused_by_name(whole, run, capsys, flags, field):
    """Nothing is touched."""
    before = [(whole / name).read_bytes() for name in (DATA, MANIFEST)]
    assert run(whole, *SAMPLED, *flags) == 2
    message = capsys.readouterr().err
    assert f"error: {whole} holds answers made with other settings: " in message and field in message
    assert [(whole / name).read_bytes() for name in (DATA, MANIFEST)] == before


def test_another_model_or_template_is_refused_by_name(whole, run, models, tmp_path, capsys):
    """A copy with another template, and one with other weights of equal size."""
    for name, change in (("chat_template.jinja", b"\n"), ("model.safetensors", None)):
        copy = tmp_path / name / "target"
        copy.mkdir(parents=True)
        for file in (models / "target").iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        data = (copy / name).read_bytes()
        (copy / name).write_bytes(data + change if change else data[:-4] + b"\0\0\0\0")
        assert run(whole, *SAMPLED, "--model", copy) == 2
        assert "model_sha256 was " in capsys.readouterr().err


def test_a_changed_data_file_is_refused_with_its_line(whole, run, tmp_path, capsys):
    """Lines in another order, a line that is no answer, one too many; and data whose manifest is gone."""
    lines = (whole / DATA).read_bytes().splitlines(keepends=True)
    for number, changed in ((1, [lines[1], lines[0]]), (2, [lines[0], b"{}\n"]), (COUNT + 1, [*lines, lines[0]])):
        (tmp_path / MANIFEST).write_bytes((whole / MANIFEST).read_bytes())
        (tmp_path / DATA).write_bytes(b"".join(changed))
        assert run(tmp_path, *SAMPLED) == 2
        assert f"{tmp_path / DATA}:{number}: expected " in capsys.readouterr().err
    (tmp_path / MANIFEST).unlink()
    assert run(tmp_path, *SAMPLED) == 2
    assert f"{tmp_path} has {DATA} and no {MANIFEST}" in capsys.readouterr().err


def test_two_processes_cannot_share_a_directory(whole, run, capsys):
    with command.locked(whole):
        assert run(whole, *SAMPLED) == 2
    assert f"another process writes to {whole}" in capsys.readouterr().err


def test_bad_flags_are_one_line_before_any_work(run, tmp_path, capsys):
    for flags, error in (
        (("--prompts", tmp_path / "none.jsonl"), "none.jsonl cannot be read"),
        (("--batch-size", 0), "batch_size must be an integer of at least 1"),
        (("--out", __file__), "test_regenerate.py is a file; give a directory"),
        (("--model", tmp_path / "none"), "is not a directory"),
        (("--thinking",), "has no enable_thinking"),
        (("--max-new-tokens", 128), "over the model's limit of 128"),
    ):
        assert run(tmp_path / "out", *flags) == 2
        message = capsys.readouterr().err
        assert error in message and message.count("\n") == 1
    assert not (tmp_path / "out").exists()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere():
    """Both tell answers, tokens a second and the time left; no carriage return goes to a file."""
    for file in (Terminal(), io.StringIO()):
        with command._progress(10, 4, file) as progress:
            progress.update(3, 600)
            progress.update(3, 600)
        text = file.getvalue()
        assert "4 of 10 answers are there; going on\n" in text
        assert "10/10" in text and "tokens/s" in text
        assert ("\r" in text) == file.isatty()
        assert file.isatty() or ("10/10 answers, " in text and " tokens/s, 00:00 left\n" in text)
