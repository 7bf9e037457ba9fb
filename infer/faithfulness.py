"""How well a head's own probabilities of drafted branches are the target's (the paper's causality study).

A branch is a path of the draft tree from the root to a leaf; of a chain it is the head's own best guess. Its gap is
sum log q - sum log p: q as the tree scores it, p the target's probability of the same tokens along the same path. A gap
near 0 is a branch that is worth what it is ranked by.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax.decode import DecodeState, Drafter, LoopSpec, decode, draft_tree, is_eos, prefill
from jetspec_jax.engine import GenerationConfig, bucket, computing, prompt_chunk, prompt_ids, tree_shape
from jetspec_jax.head import DraftHead
from jetspec_jax.models import Target
from jetspec_jax.sampling import Sampling
from jetspec_jax.target import TargetModel
from jetspec_jax.tree import TreeShape
from kernels.pallas.tree_attention import pack_mask


def branch_gaps(
    target: Target, head: DraftHead, prompts: Sequence[Any], budget: int | None, config: GenerationConfig
) -> np.ndarray:
    """The gaps, in nats, of every branch of the trees of every round that answers `prompts` greedily.

    Branches are cut behind a first end-of-sequence token: nothing follows it.

    Args:
        prompts: texts, or lists of token ids.
        budget: nodes of a tree, the root not counted; None is the head's chain.
        config: its `tree_width`, `max_new_tokens` and `attention` count; prompts go one by one.
    """
    config = dataclasses.replace(config, method="jetspec" if budget else "chain", budget=budget or head.depth)
    shape = tree_shape(config, head, target.config.vocab_size)
    spec = LoopSpec(shape, target.eos_token_ids, Sampling().mode)
    gaps: list[np.ndarray] = []
    with computing(target):
        for prompt in prompts:
            state = _prefilled(target, head, prompt_ids(target, prompt), config)
            while not bool(state.finished[0]):
                found, leaves = gaps_of_tree(target.model, head, state, shape, target.eos_token_ids)
                gaps.append(np.asarray(found)[np.asarray(leaves)])
                state = decode(target.model, head, state, np.int32(1), Sampling().knobs, spec=spec)
    return np.concatenate(gaps) if gaps else np.zeros(0, np.float32)


@functools.partial(jax.jit, static_argnames=("shape", "eos_ids"))
def gaps_of_tree(
    target: TargetModel, drafter: Drafter, state: DecodeState, shape: TreeShape, eos_ids: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """The gaps float32 `[B, N]` of the paths to all nodes of the trees that would be drafted next, and which nodes end
    a branch, bool `[B, N]`: leaves, and first end-of-sequence tokens."""
    tree, seen = draft_tree(target, drafter, state, shape)
    positions = state.lengths[:, None] + tree.depths
    out = target(tree.tokens, positions, state.cache, state.lengths, pack_mask(seen))
    logp = jax.nn.log_softmax(target.logits(out.hidden), axis=-1)
    at_parent = jnp.take_along_axis(logp, tree.parents[..., None], axis=1)
    steps = jnp.take_along_axis(at_parent, tree.tokens[..., None], axis=2)[..., 0]
    steps = jnp.where(tree.depths > 0, steps, 0.0)
    gaps = tree.scores - jnp.einsum("bnm,bm->bn", seen.astype(jnp.float32), steps)
    ends = (tree.depths > 0) & is_eos(tree.tokens, eos_ids)
    nodes = jnp.arange(tree.parents.shape[1])[None]
    has_child = jnp.any((tree.parents[:, None, :] == nodes[..., None]) & (tree.depths[:, None, :] > 0), axis=2)
    ended_before = jnp.any(seen & ends[:, None, :] & (nodes[:, None, :] != nodes[..., None]), axis=2)
    return gaps, (ends | ~has_child) & ~ended_before & (tree.depths > 0)


def _prefilled(target: Target, head: DraftHead, row: list[int], config: GenerationConfig) -> DecodeState:
    tokens = np.zeros((1, bucket(len(row) + config.max_new_tokens)), np.int32)
    tokens[0, : len(row)] = row
    lengths, seeds = np.array([len(row)], np.int32), np.zeros(1, np.uint32)
    mode, knobs = Sampling().mode, Sampling().knobs
    return prefill(
        target.model, head, tokens, lengths, lengths + config.max_new_tokens, seeds, knobs,
        eos_ids=target.eos_token_ids, mode=mode, chunk=prompt_chunk(len(row)), attention=config.attention,
    )  # fmt: skip
