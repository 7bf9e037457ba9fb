"""How much host memory loading a checkpoint takes beside the loaded arrays.

`python -m infer.benchmark_loading`. Writes a checkpoint of random bfloat16 weights (several shards), loads it in
another process, and watches that process's own memory (RssAnon; the file's pages are the system's, which it takes back)
from outside every millisecond. On a CPU the loaded arrays are host memory too, and are taken off.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from jetspec_jax.checkpoint import INDEX, hf_tensors, load_target_model
from jetspec_jax.config import TargetConfig
from jetspec_jax.target import TargetModel

_SIZES: dict[str, Any] = {
    "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip


def write_checkpoint(directory: pathlib.Path, config: TargetConfig) -> tuple[int, int]:
    """A checkpoint of random bfloat16 weights, a tensor a shard; bytes of the largest tensor and of all."""
    rng = np.random.default_rng(0)
    shapes = hf_tensors(jax.eval_shape(lambda: TargetModel(config, rngs=nnx.Rngs(0))))
    (directory / "config.json").write_text(json.dumps(config.to_hf()))
    files, sizes = {}, []
    for number, (name, leaf) in enumerate(shapes.items()):
        files[name] = f"model-{number:05}.safetensors"
        bits = rng.integers(0x3800, 0x3C00, leaf.shape, np.uint16)  # small positive numbers
        save_file({name: bits.view(ml_dtypes.bfloat16)}, directory / files[name])
        sizes.append(2 * math.prod(leaf.shape))
    (directory / INDEX).write_text(json.dumps({"weight_map": files}))
    return max(sizes), sum(sizes)


def anonymous_memory(process: int) -> int:
    """Bytes of a process's memory that no file backs; 0 when it is gone."""
    try:
        lines = pathlib.Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def watch_loading(directory: pathlib.Path) -> tuple[int, int, float]:
    """Peak and final bytes of a process that loads the checkpoint, less those before, and the seconds it took."""
    command = [sys.executable, "-m", "infer.benchmark_loading", "--load", str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as loader:
        assert loader.stdin is not None
        assert loader.stdout is not None
        loader.stdout.readline()  # imports are done
        before = peak = anonymous_memory(loader.pid)
        loader.stdin.write("go\n")
        loader.stdin.flush()
        seconds = -time.perf_counter()
        flag = directory / "loaded"
        while not flag.exists() and loader.poll() is None:
            peak = max(peak, anonymous_memory(loader.pid))
            time.sleep(0.001)
        seconds += time.perf_counter()
        final = anonymous_memory(loader.pid)
        loader.stdin.write("stop\n")
    return peak - before, final - before, seconds


def _load(directory: pathlib.Path) -> None:
    """What the watched process does."""
    jax.devices()
    print("ready", flush=True)
    sys.stdin.readline()
    model = load_target_model(directory, None)
    (directory / "loaded").touch()
    sys.stdin.readline()
    del model


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m infer.benchmark_loading", description=__doc__)
    parser.add_argument("--layers", type=int, default=6, help="of Qwen3-8B's size; 6 are 4.8 GB with both embeddings")
    parser.add_argument("--experts", type=int, default=0, help="make the layers mixtures of so many experts of 768")
    parser.add_argument("--load", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        return _load(args.load)
    sparse: dict[str, Any] = {
        "architecture": "Qwen3MoeForCausalLM", "num_experts": args.experts, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    }  # fmt: skip
    config = TargetConfig(**_SIZES, num_hidden_layers=args.layers, **(sparse if args.experts else {}))
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        largest, total = write_checkpoint(directory, config)
        peak, final, seconds = watch_loading(directory)
    largest = max(largest, 2 * args.experts * 768 * config.hidden_size)  # a layer's experts are one array here
    print(f"checkpoint {total / 1e9:.2f} GB, largest array {largest / 1e9:.3f} GB, loaded in {seconds:.1f} s")
    print(f"peak {peak / 1e9:.3f} GB, loaded {final / 1e9:.3f} GB: {(peak - final) / 1e9:.3f} GB above the result, "
          f"{(peak - final) / largest:.2f} x the largest array")  # fmt: skip
    return None


if __name__ == "__main__":
    main()
