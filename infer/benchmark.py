"""Plain greedy decoding of a random Qwen3 of 100M parameters, ours against transformers' generate, in one run.

`python -m infer.benchmark`. Both read the same checkpoint in float32 and answer the same prompts; they take turns, so
that both meet the same machine. Needs PyTorch (`pip install torch`).
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jetspec_jax
from jetspec_jax.config import TargetConfig
from jetspec_jax.target import TargetModel

CONFIG = TargetConfig(
    vocab_size=16_384, hidden_size=768, intermediate_size=2304, num_hidden_layers=12, num_attention_heads=12,
    num_key_value_heads=4, head_dim=64, max_position_embeddings=4096,
)  # fmt: skip


def random_checkpoint(directory: pathlib.Path, config: TargetConfig, seed: int = 0) -> None:
    """Writes a target with normal weights of deviation 0.02, as untrained models have."""
    rng = np.random.default_rng(seed)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return (
            jnp.asarray(rng.normal(0, 0.02, leaf.shape).astype(np.float32)) if leaf.ndim > 1 else jnp.ones(leaf.shape)
        )

    model = jax.eval_shape(lambda: TargetModel(config, rngs=nnx.Rngs(0)))
    jetspec_jax.save_target(directory, jax.tree.map(draw, model))


def ours(directory: pathlib.Path, new_tokens: int) -> Callable[[np.ndarray], tuple[float, list[list[int]]]]:
    """Our engine: a function from prompts `[batch, length]` to seconds and new tokens."""
    target = jetspec_jax.load_target(directory)

    def run(prompts: np.ndarray) -> tuple[float, list[list[int]]]:
        results = jetspec_jax.generate(
            target, None, prompts.tolist(), method="ar", max_new_tokens=new_tokens, batch_size=len(prompts)
        )
        return results[0].seconds, [result.token_ids for result in results]

    return run


def theirs(
    directory: pathlib.Path, new_tokens: int, threads: int
) -> Callable[[np.ndarray], tuple[float, list[list[int]]]]:
    """transformers' generate, likewise.

    Raises:
        ValueError: PyTorch is not installed.
    """
    try:
        import torch
    except ImportError:
        raise ValueError("the comparison needs PyTorch: pip install torch") from None
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def run(prompts: np.ndarray) -> tuple[float, list[list[int]]]:
        ids = torch.tensor(prompts)
        started = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        return time.perf_counter() - started, out[:, ids.shape[1] :].tolist()

    return run


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m infer.benchmark", description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each, in turns; medians are printed")
    parser.add_argument("--threads", type=int, default=2, help="PyTorch's; XLA takes as many as there are cores")
    args = parser.parse_args()
    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        random_checkpoint(directory, CONFIG)
        try:
            engines = {"jetspec-jax": ours(directory, args.new_tokens),
                       "transformers": theirs(directory, args.new_tokens, args.threads)}  # fmt: skip
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from None
    print(f"{'batch':>5}{'jetspec-jax':>14}{'transformers':>14}{'ratio':>8}   tokens/s, medians of {args.repeats}")
    for batch in args.batch_sizes:
        prompts = rng.integers(0, CONFIG.vocab_size, (batch, args.prompt_tokens))
        texts = [engine(prompts)[1] for engine in engines.values()]  # compiles, and warms up
        same = sum(a == b for a, b in zip(*texts, strict=True))
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(args.repeats):
            for name, engine in engines.items():
                seconds[name].append(engine(prompts)[0])
        rates = [batch * args.new_tokens / statistics.median(times) for times in seconds.values()]
        pairs = zip(seconds["transformers"], seconds["jetspec-jax"], strict=True)
        ratio = statistics.median(theirs / ours for theirs, ours in pairs)
        print(f"{batch:>5}{rates[0]:>14.1f}{rates[1]:>14.1f}{ratio:>7.2f}x   {same} of {batch} texts equal", flush=True)


if __name__ == "__main__":
    main()
