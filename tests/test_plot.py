"""Curves of runs: every metric of metrics.jsonl is found, drawn to a PNG, and what cannot be read is named."""

import json

import pytest

from train import plot

LINES = [
    {"step": 10, "loss": 3.0, "learning_rate": 1e-3, "agreement": [0.5, 0.25], "accepted_length": 1.5, "skipped": 0},
    {"step": 20, "loss": None, "agreement": None, "skipped": 1},
    {"step": 20, "tau": {"chain": 2.0, "16": 3.5}},
    {"step": 30, "loss": 1.0, "learning_rate": 5e-4, "agreement": [0.75, 0.5], "accepted_length": 2.5, "skipped": 1},
]


@pytest.fixture
def run(tmp_path):
    def write(name, lines):
        (tmp_path / name).mkdir()
        (tmp_path / name / plot.METRICS).write_text("".join(f"{line}\n" for line in lines))
        return tmp_path / name

    return write


def test_curves_hold_numbers_lists_by_slot_and_budgets_by_name(run):
    curves = plot.read_curves(run("a", map(json.dumps, LINES)))
    assert curves["loss"] == {"": [(10, 3.0), (30, 1.0)]}  # a step without a number leaves a gap
    assert curves["agreement"] == {"1": [(10, 0.5), (30, 0.75)], "2": [(10, 0.25), (30, 0.5)]}
    assert curves["tau"] == {"chain": [(20, 2.0)], "16": [(20, 3.5)]}
    assert "step" not in curves


def test_the_command_draws_a_png_of_several_runs(run, tmp_path, capsys):
    runs = [str(run(name, map(json.dumps, LINES))) for name in "ab"]
    out = tmp_path / "curve.png"
    plot.main([*runs, "--out", str(out)])
    assert out.read_bytes().startswith(b"\x89PNG\r\n") and out.stat().st_size > 10_000
    assert capsys.readouterr().out.endswith("loss, accepted_length, agreement, tau, learning_rate\n")


def test_named_metrics_alone_are_drawn(run, tmp_path):
    assert plot.draw([run("a", map(json.dumps, LINES))], ["skipped"], tmp_path / "x.png") == ["skipped"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"step": 1, "loss": 2}', '{"step": 2, "lo'], r"metrics.jsonl, line 2: not JSON"),
        (['{"loss": 2}'], r"metrics.jsonl, line 1: expected an object with a number `step`"),
        (["[1]"], r"line 1: expected an object"),
        ([], r"metrics.jsonl: no metrics"),
    ],
)
def test_lines_that_cannot_be_read_are_named_with_file_and_line(run, lines, message):
    with pytest.raises(ValueError, match=message):
        plot.read_curves(run("a", lines))


def test_a_missing_run_or_metric_ends_the_command_with_its_name(run, tmp_path, capsys):
    for arguments, message in [
        ([str(tmp_path / "none")], "none: expected a run"),
        ([str(run("a", map(json.dumps, LINES))), "--metric", "perplexity"], "no run has --metric perplexity"),
    ]:
        with pytest.raises(SystemExit) as ended:
            plot.main([*arguments, "--out", str(tmp_path / "x.png")])
        assert ended.value.code == 2 and message in capsys.readouterr().err
