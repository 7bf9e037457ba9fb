"""Golden data of the PyTorch reference, and prompts run through the decode loop."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax.checkpoint import load_head_model, load_target_model
from jetspec_jax.decode import LoopSpec, NoDrafter, decode, prefill
from jetspec_jax.sampling import Sampling
from jetspec_jax.tree import TreeShape

GOLDEN = pathlib.Path(__file__).parent / "fixtures" / "golden"
CHUNK = 16
PLAIN = TreeShape(budget=0, width=1, depth=0)
CHAIN = TreeShape(budget=7, width=1, depth=7)


@functools.cache
def target(name="target_dense"):
    return load_target_model(GOLDEN / name, None)


@functools.cache
def head(name):
    return load_head_model(GOLDEN / name, None)


@functools.cache
def arrays(name):
    with np.load(GOLDEN / f"{name}.npz") as data:
        return dict(data)


@functools.cache
def cases(name):
    return json.loads((GOLDEN / f"{name}.json").read_text())


@dataclasses.dataclass(frozen=True)
class Row:
    """One generated row: its new tokens, and how many of them each round committed (the first token: none did)."""

    tokens: list[int]
    committed: list[int]


def generate(model, drafter, prompts, max_new_tokens, shape, eos_ids=(), batch=None, capacity=112):
    """Runs prompts (lists of ids) greedily in one batch of `batch` rows; `max_new_tokens` is one number a row."""
    sampling = Sampling()
    spec = LoopSpec(shape, tuple(eos_ids), sampling.mode)
    batch = batch or len(prompts)
    lengths, limits = np.zeros((2, batch), np.int32)  # a row of length 0 is padding
    tokens = np.zeros((batch, capacity), np.int32)
    for b, (prompt, new) in enumerate(zip(prompts, max_new_tokens, strict=True)):
        lengths[b], limits[b] = len(prompt), len(prompt) + new
        tokens[b, : len(prompt)] = prompt
    assert limits.max() <= capacity
    drafter = NoDrafter() if drafter is None else drafter
    state = prefill(
        model,
        drafter,
        jnp.asarray(tokens),
        lengths,
        limits,
        np.zeros(batch, np.uint32),
        sampling.knobs,
        eos_ids=spec.eos_ids,
        mode=spec.mode,
        chunk=CHUNK,
    )
    state = decode(model, drafter, state, jnp.int32(capacity), sampling.knobs, spec=spec)
    state = jax.tree.map(np.asarray, dataclasses.replace(state, cache=None, context=None, keys=None))
    assert state.finished.all()
    rows = []
    for b, length in enumerate(lengths[: len(prompts)]):
        new = slice(int(length), int(state.lengths[b]) + 1)
        counts = np.bincount(state.token_rounds[b, new], minlength=state.rounds[b] + 1)
        assert counts[0] == 1, "only the first token belongs to no round"
        assert len(counts) == state.rounds[b] + 1, "no token comes from a round after the last"
        rows.append(Row(state.tokens[b, new].tolist(), counts[1:].tolist()))
    return rows
