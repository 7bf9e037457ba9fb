"""A tiny target and head, and one packed batch of two rows of two documents that most tests of training share, so that
a few programs are compiled once."""

import functools

import jax
import numpy as np
from tiny import random_module

from jetspec_jax.config import HeadConfig, TargetConfig
from jetspec_jax.head import DraftHead
from jetspec_jax.target import TargetModel
from train.data import Packed
from train.objective import Blocks, distillation_loss, draft_blocks
from train.packed import target_forward

VOCAB, MASK, BLOCK = 40, 39, 5
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 1e4, "max_position_embeddings": 64,
}  # fmt: skip
TARGET = TargetConfig(**SIZES, num_hidden_layers=2)
HEAD = {"block_size": BLOCK, "num_target_layers": 2, "target_layer_ids": (0, 1), "mask_token_id": MASK}
LENGTH = 24
DOCUMENTS = (((9, 3), (12, 0)), ((14, 5), (10, 4)))  # rows of (tokens, prompt tokens); row 0 ends in padding
STARTS = ((0, 9), (0, 14))
# First response tokens (of a document that is all response too), neighbours closer than a block, last ones.
ANCHORS = np.array([[3, 5, 9, 17], [5, 12, 18, 22]], np.int32)
FILLED = np.array([[0, 2, 0, 3], [0, 1, 3, 0]], np.int32)


def fresh_models(causal, layers=2, parent_rank=0):
    config = HeadConfig(**SIZES, **HEAD, num_hidden_layers=layers, causal_head=causal, parent_rank=parent_rank)
    return random_module(TargetModel, TARGET, 0), random_module(DraftHead, config, 1)


OPTIONS = ("gamma", "temperature", "loss", "compute_dtype", "logit_chunk")

models = functools.cache(fresh_models)
forward = jax.jit(target_forward, static_argnames="tap_ids")
drafted = jax.jit(draft_blocks)
logits_of = lambda target, hidden: np.asarray(jax.jit(TargetModel.logits)(target, hidden))  # noqa: E731
drawn_loss = jax.jit(distillation_loss, static_argnames=OPTIONS)
drawn_grad = jax.jit(jax.grad(distillation_loss, has_aux=True), static_argnames=OPTIONS)


@functools.cache
def packed():
    """The batch of `DOCUMENTS`, with random tokens."""
    rng = np.random.default_rng(0)
    shape = (len(DOCUMENTS), LENGTH)
    batch = Packed(*(np.zeros(shape, dtype) for dtype in (np.int32, np.int32, np.int32, bool)))
    for row, documents in enumerate(DOCUMENTS):
        for number, (start, (size, prompt)) in enumerate(zip(STARTS[row], documents), start=1):
            part = np.s_[row, start : start + size]
            batch.tokens[part] = rng.integers(0, MASK, size)
            batch.positions[part] = np.arange(size)
            batch.documents[part] = number
            batch.response[part] = np.arange(size) >= prompt
    return batch


def blocks_of(filled=True, live=True):
    return Blocks(ANCHORS, FILLED if filled else np.zeros_like(FILLED), np.full(ANCHORS.shape, live))


@functools.cache
def outputs():
    return forward(models(True)[0], packed(), tap_ids=HEAD["target_layer_ids"])
