"""`python -m kernels.pallas.inspect`: what the kernel compiles to on a GPU that need not be there.

Needs the CUDA plugin's wheels (`pip install -e '.[plan]'`), and no GPU.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.pallas.tree_attention import Problem, pallas_triton, xla
from kernels.pallas.tree_attention.tiles import TileConfig, choose_tiles, programs_at_once
from kernels.pallas.tree_attention.work import ideal_work, kernel_work, peak
from kernels.topology import CHIPS, Chip, compiling_for, gpu_devices

_INSTRUCTIONS = ("wgmma.mma_async", "tcgen05.mma", "mma.sync", "cp.async.cg")


class Report(NamedTuple):
    """One compiled kernel: what it asks of the GPU, as its compiler and assembler say.

    config, splits: what was compiled. grid, threads: programs, and threads of each. registers: of a thread;
    spilled: bytes stored to memory for want of registers. shared: bytes of a program. temporaries: XLA's, in bytes,
    of the kernel and the merge. instructions: how often the tensor-core and asynchronous-copy instructions occur.
    """

    config: TileConfig
    splits: int
    grid: tuple[int, int, int]
    threads: int
    registers: int
    spilled: int
    shared: int
    temporaries: int
    instructions: dict[str, int]


def abstract_arguments(problem: Problem, device: jax.Device) -> dict[str, jax.ShapeDtypeStruct]:
    """The arguments of `tree_attention` by name, as shapes on `device`."""
    batch, nodes, heads, kv_heads, head_dim, capacity, page_size, dtype = problem
    own, cache = (batch, nodes, kv_heads, head_dim), (batch, kv_heads, capacity, head_dim)
    pages = 0 if page_size is None else -(-capacity // page_size)
    if page_size is not None:
        cache = (batch * pages, kv_heads, page_size, head_dim)
    shapes = {
        "query": ((batch, nodes, heads, head_dim), dtype),
        "key": (own, dtype),
        "value": (own, dtype),
        "cache_key": (cache, dtype),
        "cache_value": (cache, dtype),
        "lengths": ((batch,), jnp.int32),
        "mask": ((batch, nodes, -(-nodes // 32)), jnp.uint32),
    } | ({"page_table": ((batch, pages), jnp.int32)} if pages else {})
    sharding = jax.sharding.SingleDeviceSharding(device)
    return {name: jax.ShapeDtypeStruct(*shape, sharding=sharding) for name, shape in shapes.items()}


def inspect(problem: Problem, chip: str, config: TileConfig | None = None) -> Report:
    """Compiles the kernel for `problem` on `chip`, with the shipped tiles unless told otherwise.

    Raises:
        ValueError: the kernel declines the problem, the chip is unknown, or what compiling needs is not installed.
    """
    if reasons := pallas_triton.why_not(problem):
        raise ValueError(f"{pallas_triton.NAME} declines: {', '.join(reasons)}")
    [device] = gpu_devices(chip)
    config, splits = choose_tiles(problem, CHIPS[chip], config)
    attend = functools.partial(pallas_triton.attend, scale=problem.head_dim**-0.5, config=config, splits=splits)
    with tempfile.TemporaryDirectory() as dump:
        temporaries = _compile(attend, problem, device, dump)
        assemblies = [path.read_text() for path in pathlib.Path(dump).glob("*.ptx")]
        [launches] = [path.read_text() for path in pathlib.Path(dump).glob("*thunk_sequence.txt")]
    [ptx] = [text for text in assemblies if ".entry tree_attention" in text]
    launch = re.search(r"tree_attention grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+).*shared_memory: (\d+)", launches)
    assert launch is not None, launches
    x, y, z, threads, shared = map(int, launch.groups())
    registers, spilled = _assemble(ptx, CHIPS[chip])
    instructions = {name: ptx.count(name) for name in _INSTRUCTIONS if name in ptx}
    return Report(config, splits, (x, y, z), threads, registers, spilled, shared, temporaries, instructions)


def _compile(attend: Callable[..., jax.Array], problem: Problem, device: jax.Device, dump: str | None = None) -> int:
    """Compiles `attend` and gives XLA's temporaries in bytes; what XLA writes of its work goes to `dump`."""
    function = jax.jit(lambda arguments: attend(**arguments))
    with compiling_for(device.device_kind):
        lowered = function.trace(abstract_arguments(problem, device)).lower(lowering_platforms=("cuda",))
        # Later JAX writes the PTX only when asked; every emitter's dump would take ten times as long as compiling.
        options = None if dump is None else {"xla_dump_to": dump, "xla_dump_emitter_re": "ptx"}
        compiled = lowered.compile(compiler_options=options)
    return compiled.memory_analysis().temp_size_in_bytes


def _assemble(ptx: str, chip: Chip) -> tuple[int, int]:
    """Registers of a thread and spilled bytes, by NVIDIA's assembler."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [_ptxas(), "-v", f"-arch={chip.architecture}", "-o", os.devnull, file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    registers, spilled = (re.search(p, done.stderr) for p in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
    if done.returncode or not registers or not spilled:
        raise RuntimeError(f"{command[0]} failed: {done.stderr}")
    return int(registers[1]), int(spilled[1])


def _ptxas() -> str:
    """The assembler of the wheel that `.[plan]` installs, or the one on the path."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or [] if spec else []:
        for path in sorted(pathlib.Path(folder).glob("*/bin/ptxas")):
            return str(path)
    found = shutil.which("ptxas")
    if found is None:
        raise ValueError("ptxas is not installed: pip install -e '.[plan]'")
    return found


def design_fraction(problem: Problem, chip: Chip, config: TileConfig, splits: int) -> float:
    """The share of the roofline bound that this grid can reach at most.

    What it loses: tiles filled up with rows and keys that are not there, partial results through memory, and the last
    wave of programs, which leaves a part of the GPU idle. What cores lose inside a program is not in it.
    """
    work = kernel_work(problem, config, splits)
    programs = -(-problem.nodes * problem.group // config.block_rows) * problem.batch * problem.kv_heads * splits
    slots = programs_at_once(config, chip)
    busy = programs / (-(-programs // slots) * slots)
    moving, multiplying = work.bytes / chip.bandwidth, work.operations / (peak(chip, problem.dtype) * busy)
    return ideal_work(problem).seconds(chip, problem.dtype) / max(moving, multiplying)


def describe_report(problem: Problem, chip: str) -> str:
    """The command's text for one problem."""
    report, gpu = inspect(problem, chip), CHIPS[chip]
    work = ideal_work(problem)
    bound = work.seconds(gpu, problem.dtype)
    by = "memory" if work.bytes / gpu.bandwidth == bound else "products"
    counts = ", ".join(f"{count} {name}" for name, count in report.instructions.items())
    [device] = gpu_devices(chip)
    plain = _compile(functools.partial(xla.attend, scale=problem.head_dim**-0.5), problem, device)
    fraction = design_fraction(problem, gpu, report.config, report.splits)
    cache = "contiguous cache" if problem.page_size is None else f"pages of {problem.page_size}"
    return f"""{gpu.name} ({gpu.architecture}), {problem.dtype}, {cache}
tiles        {report.config.block_rows} rows x {report.config.block_keys} keys, {report.config.num_warps} warps, \
{report.config.num_stages} stages; prefix in {report.splits} part(s)
grid         {" x ".join(map(str, report.grid))} programs of {report.threads} threads
registers    {report.registers} a thread, {report.spilled} bytes spilled
shared       {report.shared:,} bytes a program, of {gpu.shared_per_block:,}
instructions {counts}
temporaries  {report.temporaries:,} bytes (XLA attention: {plain:,})
roofline     {work.bytes:,} bytes, {work.operations:,} operations: {bound * 1e6:.1f} us, bound by {by}
design       {fraction:.0%} of it with this grid"""


def table(chip: str) -> str:
    """Qwen3-8B's attention over batch, context and nodes, as a Markdown table; nothing is compiled."""
    gpu = CHIPS[chip]
    head = "| batch | context | nodes | MB | GFLOP | memory us | products us | tiles | parts | of the bound |"
    lines = [head, "|" + "---|" * 10]
    for batch in (1, 8, 32):
        for context in (2048, 32_768):
            for nodes in (1, 64, 256):
                problem = Problem(batch, nodes, 32, 8, 128, context, None, jnp.dtype(jnp.bfloat16))
                config, splits = choose_tiles(problem, gpu)
                work = ideal_work(problem)
                moving, multiplying = work.bytes / gpu.bandwidth, work.operations / peak(gpu, problem.dtype)
                cells = (
                    batch, context, nodes, f"{work.bytes / 1e6:.1f}", f"{work.operations / 1e9:.2f}",
                    f"{moving * 1e6:.1f}", f"{multiplying * 1e6:.1f}", f"{config.block_rows} x {config.block_keys}",
                    splits, f"{design_fraction(problem, gpu, config, splits):.0%}",
                )  # fmt: skip
                lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def compiled_table() -> str:
    """What each shipped tile compiles to, for Qwen3-8B's heads at 4096 tokens, and for heads of 256; Markdown."""
    lines = [
        "| chip | dtype | head_dim | nodes | tiles | warps | stages | registers | spilled | shared |",
        "|" + "---|" * 10,
    ]
    for chip in ("a100", "h100", "b200"):
        for dtype, head_dim, nodes in (
            ("bfloat16", 128, 1), ("bfloat16", 128, 16), ("bfloat16", 128, 256), ("bfloat16", 256, 1),
            ("bfloat16", 256, 256), ("float32", 128, 1), ("float32", 128, 256),
        ):  # fmt: skip
            heads = 32 * 128 // head_dim
            report = inspect(Problem(1, nodes, heads, 8, head_dim, 4096, None, jnp.dtype(dtype)), chip)
            tiles = f"{report.config.block_rows} x {report.config.block_keys}"
            cells = (
                chip, dtype, head_dim, nodes, tiles, report.config.num_warps, report.config.num_stages,
                report.registers, report.spilled, f"{report.shared / 1024:.1f} KiB",
            )  # fmt: skip
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m kernels.pallas.inspect", description=__doc__)
    parser.add_argument("--chip", choices=sorted(CHIPS), default="h100")
    parser.add_argument("--nodes", type=int, default=256)
    parser.add_argument("--context", type=int, default=4096, help="cached tokens of a row")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--page-size", type=int, help="rows of a page; a contiguous cache by default")
    parser.add_argument("--table", action="store_true", help="only count, for Qwen3-8B at many sizes")
    parser.add_argument("--compiled-table", action="store_true", help="only compile every shipped tile for three chips")
    args = parser.parse_args()
    heads = args.heads, args.kv_heads, args.head_dim
    problem = Problem(args.batch_size, args.nodes, *heads, args.context, args.page_size, jnp.dtype(args.dtype))
    try:
        if args.table or args.compiled_table:
            print(table(args.chip) if args.table else compiled_table())
        else:
            print(describe_report(problem, args.chip))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
