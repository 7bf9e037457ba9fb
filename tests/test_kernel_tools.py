"""The tools around the kernel: the check of a machine finds wrong results, and the counts of work are right."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.pallas import check, inspect
from kernels.pallas.tree_attention import Problem, pallas_triton
from kernels.pallas.tree_attention.reference import reference
from kernels.pallas.tree_attention.tiles import TileConfig
from kernels.pallas.tree_attention.work import Work, ideal_work, kernel_work
from kernels.topology import CHIPS, chip_in_use

SMALL = Problem(2, 5, 4, 2, 32, 48, None, jnp.dtype(jnp.float32))
QWEN3 = Problem(1, 256, 32, 8, 128, 32_768, None, jnp.dtype(jnp.bfloat16))


def test_a_wrong_backend_is_found_and_named(monkeypatch, capsys):
    """One result in a thousand off by a hundredth is called wrong, for the backend that has it and no other."""
    assert check.compare([SMALL])
    assert "WRONG" not in capsys.readouterr().out
    right = check.tree_attention
    off = lambda out: out.at[1, 2, 3, 4].add(0.01)  # noqa: E731
    monkeypatch.setattr(
        check, "tree_attention", lambda *a, backend, **k: off(right(*a, **k)) if backend == "pallas" else right(*a, **k)
    )
    assert not check.compare([SMALL])
    pallas, xla = capsys.readouterr().out.split("pallas")[1].split("xla")
    assert "WRONG" in pallas
    assert "WRONG" not in xla


def test_what_the_kernel_is_timed_against_computes_the_same(monkeypatch):
    """Every rival that runs here gives the reference's numbers, from dense masks and contiguous keys."""
    args = check.random_arguments(SMALL, ragged=False)
    expected = reference(**{name: np.asarray(x) for name, x in args.items()})
    rivals = check.rivals(args)
    assert list(rivals) == ["pallas", "xla", "jax.nn cudnn", "jax.nn xla"]
    for name in ("xla", "jax.nn xla"):
        attend, rest = rivals[name]
        np.testing.assert_allclose(attend(args["query"], **rest), expected, rtol=0, atol=1e-5)


def test_times_come_as_a_table_with_a_reason_where_there_is_none(capsys):
    """Without a GPU, cudnn says that it cannot run; the others have a time and a share of the bound."""
    check.time_all([SMALL], steps=2)
    row = capsys.readouterr().out.splitlines()[-1]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[0] == "float32 batch 2, context 48, 5 nodes"
    assert cells[3].startswith("no: ")
    assert all("%" in cells[i] for i in (1, 2, 4))


def test_arguments_of_a_check_are_paged_like_contiguous_ones():
    """The same numbers of both, by the reference: pages are a permutation of the rows."""
    flat, paged = (check.random_arguments(SMALL._replace(page_size=size), ragged=True) for size in (None, 16))
    expected, got = (reference(**{k: np.asarray(x) for k, x in args.items()}) for args in (flat, paged))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


def test_work_of_one_attention_by_hand():
    """3 keys in the cache, 2 nodes, 2 heads on 1 kv head of width 32 in bfloat16: 5 keys are read and multiplied."""
    problem = Problem(1, 2, 2, 1, 32, 3, None, jnp.dtype(jnp.bfloat16))
    rows, keys = 2 * 2, 5
    own = 64 * (2 * keys + 2 * rows) + 2 * 4
    assert ideal_work(problem) == Work(own, 4 * rows * keys * 32)
    tiles = TileConfig(16, 32, 4, 1)
    assert kernel_work(problem, tiles, 1) == Work(own, 4 * 16 * (32 + 32) * 32)
    assert kernel_work(problem, tiles, 2).bytes - own == 2 * 3 * 4 * rows * (32 + 2)


def test_the_bound_is_the_slower_of_moving_and_multiplying():
    """On an H100, one node of Qwen3-8B is bound by memory, a tree of 256 by products; float32 has no tensor cores."""
    chip = CHIPS["h100"]
    one, tree = ideal_work(QWEN3._replace(nodes=1)), ideal_work(QWEN3)
    assert one.seconds(chip, jnp.bfloat16) == one.bytes / chip.bandwidth
    assert tree.seconds(chip, jnp.bfloat16) == tree.operations / 989e12
    assert tree.seconds(chip, jnp.float32) == pytest.approx(tree.operations / 66.9e12, rel=1e-2)


def test_the_table_covers_qwen3_8b_and_promises_no_more_than_the_bound():
    """3 batches x 2 contexts x 3 sizes of tree; shares of the bound lie in (0, 100%]."""
    rows = [line.strip("| ").split(" | ") for line in inspect.table("h100").splitlines()[2:]]
    assert len(rows) == 18
    assert all(0 < int(row[-1].rstrip("%")) <= 100 for row in rows)


def test_what_the_kernel_declines_is_not_compiled():
    with pytest.raises(ValueError, match="pallas_triton declines: head_dim 96"):
        inspect.inspect(QWEN3._replace(head_dim=96), "h100")


def test_a_gpu_older_than_ampere_is_declined_by_name(monkeypatch):
    old = CHIPS["a100"]._replace(name="Tesla V100", capability=(7, 0))
    monkeypatch.setattr(pallas_triton, "chip_in_use", lambda: old)
    assert pallas_triton.why_not(QWEN3) == ["Tesla V100 is not an NVIDIA GPU from Ampere on (compute capability 8.0)"]


def test_a_gpu_of_another_maker_is_declined_by_name(monkeypatch):
    """Its compute capability is no number; `auto` then takes XLA."""
    amd = types.SimpleNamespace(device_kind="AMD Instinct MI300X", compute_capability="gfx942", core_count=304)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [amd])
    assert pallas_triton.why_not(QWEN3) == [
        "AMD Instinct MI300X is not an NVIDIA GPU from Ampere on (compute capability 8.0)"
    ]
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(**{**vars(amd), "compute_capability": "12.0"})])
    assert chip_in_use().capability == (12, 0)


def test_a_gpu_that_is_not_known_has_times_and_no_roofline(monkeypatch, capsys):
    monkeypatch.setattr(check, "chip_in_use", lambda: CHIPS["a100"]._replace(name="NVIDIA L4"))
    monkeypatch.setattr(check, "rivals", lambda args: {"xla": (lambda query, **rest: query, {})})
    check.time_all([SMALL], steps=2)
    out = capsys.readouterr().out
    assert "NVIDIA L4; microseconds (roofline unknown)" in out and "%" not in out


def test_contexts_that_pages_do_not_divide_are_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["check", "--context", "1000"])
    with pytest.raises(SystemExit, match="2"):
        check.main()
    assert "--context must be multiples of 64" in capsys.readouterr().err


def test_a_jax_without_the_triton_lowering_is_named(monkeypatch):
    monkeypatch.setattr(pallas_triton, "plgpu", None)
    [reason] = pallas_triton.why_not(QWEN3)
    assert reason.endswith("has no Triton lowering")


def test_without_a_gpu_tiles_are_an_h100s():
    assert chip_in_use() == CHIPS["h100"]
