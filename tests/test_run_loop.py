"""What a training run writes and when, around steps that are stand-ins: nothing is compiled."""

import sys
import types

import jax
import orbax.checkpoint as ocp
import pytest
from absl import app, flags
from tiny import head_config, random_module

from jetspec_jax.checkpoint import load_head_model
from jetspec_jax.head import DraftHead
from train import distill as command
from train import evaluate
from train.checkpoints import Checkpoints, export
from train.command import given_config, parse_flags
from train.config import DistillConfig, OptimizerConfig, PretrainConfig
from train.distill import Interrupted, distill
from train.metrics import Window
from train.pretrain import pretrain

SIGTERM = 15


@pytest.fixture(scope="module")
def head():
    return random_module(DraftHead, head_config(64), 0)


def test_a_head_is_written_where_a_kill_left_part_of_one(head, tmp_path):
    """The weights' temporary file has a name of its own every time."""
    (tmp_path / ".export").mkdir()
    (tmp_path / ".export" / ".tmpXb2kQp").write_text("half")
    export(tmp_path, head)
    assert load_head_model(tmp_path, None).config == head.config
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


class Log:
    def stepped(self):
        pass

    def report(self, step, values):
        pass


class Saved:
    """Notes the step and the tau of every checkpoint, and whether `best` was there before it."""

    def __init__(self, out):
        self.out, self.saved = out, []

    def save(self, step, state, batches, tau):
        self.saved.append((step, tau, (self.out / "best" / "config.json").exists()))

    def wait(self):
        pass


@pytest.fixture
def run(head, tmp_path, monkeypatch):
    """Takes four steps that do nothing, evaluated every two; gives the checkpoints that were saved.

    told: the step before whose end SIGTERM came. evaluate: gives the taus.
    """
    config = DistillConfig(steps=4, log_every=9, save_every=9, eval_every=2)
    objects = {name: None for name in ("mesh", "optimizer", "objective", "peak")}
    setup = types.SimpleNamespace(
        config=config, target=types.SimpleNamespace(model=None), flops=lambda batch: 0.0,
        blocks=lambda step, batch: None, **objects,
    )  # fmt: skip
    monkeypatch.setattr(command, "place_rows", lambda rows, mesh: rows)
    monkeypatch.setattr(command, "train_step", lambda state, *_, **__: (state, None))
    monkeypatch.setattr(command._Run, "_report", lambda self, step, window: {})

    def steps(evaluate, told=0):
        evaluation = types.SimpleNamespace(tau=lambda target, head: evaluate())
        checkpoints = Saved(tmp_path)
        taken = command._Run(setup, tmp_path, checkpoints, Log(), evaluation, None)
        state = types.SimpleNamespace(head=head)
        try:
            taken.steps(state, 0, iter(range(9)), lambda step: SIGTERM if step == told else 0)
        finally:
            saved.extend(checkpoints.saved)

    saved = []
    return steps, saved


def test_the_best_head_is_written_before_the_checkpoint_with_its_tau(run):
    """A kill in between is made good by the resume, which takes the steps again; the other way it is not."""
    steps, saved = run
    steps(lambda: {"chain": 2.0})
    assert saved == [(2, 2.0, True), (4, 2.0, True)]


def test_a_signal_in_a_step_that_is_evaluated_loses_no_evaluation(run):
    """No later run would make up for it, as the step is taken."""
    steps, saved = run
    with pytest.raises(Interrupted):
        steps(lambda: {"chain": 2.0}, told=4)
    assert [(step, tau) for step, tau, _ in saved] == [(2, 2.0), (4, 2.0)]


def test_an_evaluation_that_fails_loses_no_step(run):
    """The state is saved without a tau, and the error raised."""
    steps, saved = run

    def fails():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        steps(fails)
    assert saved == [(2, None, False)]


def test_at_most_two_steps_are_under_way(monkeypatch):
    """So that a signal is not seen long after it came."""
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.extend)
    window = Window()
    for step in range(5):
        window.add(step, 0.0)
    assert waited == [0, 1, 2]


def test_a_checkpoint_that_cannot_be_written_is_an_os_error(tmp_path, monkeypatch):
    """Whatever type orbax gives it: a ValueError would be said to be the user's."""

    def full(self):
        raise ValueError("RESOURCE_EXHAUSTED: no space left on device")

    checkpoints = Checkpoints(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "wait_until_finished", full)
        with pytest.raises(OSError, match=rf"{tmp_path} cannot be written \(ValueError: RESOURCE_EXHAUSTED"):
            checkpoints.wait()
    checkpoints.close()


# What is refused before any work. There is no target in "nowhere".


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"eval_prompts": "none.jsonl"}, r"none\.jsonl cannot be read"),
        ({"eval_prompts": "tasks:2", "eval_budgets": (0,)}, r"--config\.eval_budgets must be whole numbers above 0"),
        ({"eval_prompts": "tasks:2", "eval_budgets": (8.5,)}, r"--config\.eval_budgets must be whole numbers above 0"),
        ({"eval_every": 0, "optimizer": OptimizerConfig(final_scale=-3)}, r"final_scale must be at least 0, got -3"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_the_target_is_looked_for(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        distill(DistillConfig(**{"target": "nowhere", "data": "x", "out": str(tmp_path), "eval_every": 5, **fields}))


def test_a_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=f"{tmp_path}/run already holds config.json"):
        distill(DistillConfig(target="nowhere", data="x", out="~/run"))


def test_a_pretrained_target_is_not_overwritten(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=f"{tmp_path} already holds a model; give another --config.out"):
        pretrain(PretrainConfig(out=str(tmp_path)))


def test_the_config_of_another_command_is_refused(monkeypatch, capsys):
    """And so is a field that no config has, in one line."""
    monkeypatch.setattr(flags, "FLAGS", types.SimpleNamespace(config=PretrainConfig()))
    with pytest.raises(ValueError, match="--config gives a PretrainConfig, and this command needs a DistillConfig"):
        given_config(DistillConfig)

    def unknown(argv):
        raise KeyError("Field stps not found")

    monkeypatch.setattr(app, "parse_flags_with_usage", unknown)
    with pytest.raises(SystemExit, match="2"):
        parse_flags([])
    assert capsys.readouterr().err == "error: Field stps not found; train/config.py lists the fields\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no answers; expected what infer.generate --json prints"),
        ('{"prompt": [{"role": "user"}]}', "not a held-out problem: \"[{'role': 'user'}]\""),
        ("null", "not a held-out problem: 'None'"),
    ],
)
def test_answers_that_cannot_be_scored_are_an_error(tmp_path, monkeypatch, capsys, text, message):
    monkeypatch.setattr(evaluate, "_SEARCHED", 1)
    monkeypatch.setattr(sys, "argv", ["evaluate", "score", str(tmp_path / "answers.jsonl")])
    (tmp_path / "answers.jsonl").write_text(text)
    with pytest.raises(SystemExit, match="2"):
        evaluate.main()
    assert message in capsys.readouterr().err
