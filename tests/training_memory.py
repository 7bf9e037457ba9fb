"""Memory of the parts of a training step at the paper's sizes, compiled from shapes alone.

`python tests/training_memory.py` prints, as JSON, bytes of temporaries on an H100 that need not be there.
"""

import functools
import json

import jax
import jax.numpy as jnp
from flax import nnx

from jetspec_jax.config import TargetConfig
from jetspec_jax.layers import KeyValue
from jetspec_jax.path_tree import ParentTerm
from jetspec_jax.target import TargetModel
from kernels.topology import gpu_devices
from train.attention import block_attention, document_attention
from train.chunked import Lessons, Student, automatic_chunk, chunked_loss

VOCAB, FEATURES, LENGTH, ANCHORS, SLOTS = 151_936, 4096, 3072, 256, 16
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def loss_bytes(device=None, *, loss="forward_kl", chunk=None, parent_rank=0):
    """Temporaries of the loss of all slots of one row, and of its gradient, in bfloat16; the parent term's weights are
    float32, as in training."""
    config = TargetConfig(
        vocab_size=VOCAB, hidden_size=FEATURES, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
    )  # fmt: skip
    target = jax.eval_shape(lambda: TargetModel(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    slots = ANCHORS * SLOTS
    chunk = chunk or automatic_chunk(VOCAB, 1, slots)

    def objective(*args):
        results = chunked_loss(*args, loss, 1.0, chunk)
        return results.loss, results

    lessons = Lessons(*(shape(1, slots, dtype=dtype) for dtype in (*(jnp.int32,) * 3, jnp.float32)))
    term = None
    if parent_rank:
        term = jax.eval_shape(lambda: ParentTerm(VOCAB, parent_rank, rngs=nnx.Rngs(0), dtype=jnp.float32))
    args = Student(shape(1, slots, FEATURES), term), target, shape(1, LENGTH, FEATURES), lessons
    return temporaries(jax.value_and_grad(objective, has_aux=True), args, device)


def block_attention_bytes(device=None, *, chunk=None):
    """Temporaries of one layer's block attention in one row, and of its gradient."""

    def total(query, own, context, seen):
        out = block_attention(query, own, context, seen, causal=True, chunk=chunk)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    own = KeyValue(*[shape(1, ANCHORS, SLOTS, KV_HEADS, HEAD_DIM)] * 2)
    context = KeyValue(*[shape(1, LENGTH, KV_HEADS, HEAD_DIM)] * 2)
    args = shape(1, ANCHORS, SLOTS, HEADS, HEAD_DIM), own, context, shape(1, ANCHORS, LENGTH, dtype=jnp.bool_)
    return temporaries(jax.grad(total, (0, 1, 2)), args, device)


def document_attention_bytes(device=None, *, chunk=None):
    """Temporaries of one layer's attention over one row of the target, forward."""
    rows = [shape(1, LENGTH, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    args = *rows, shape(1, LENGTH, dtype=jnp.int32)
    return temporaries(functools.partial(document_attention, chunk=chunk), args, device)


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def temporaries(function, args, device):
    """Bytes of XLA's scratch for `function`, on `device` or on this machine's CPU."""
    sharding = None if device is None else jax.sharding.SingleDeviceSharding(device)
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    traced = jax.jit(function).trace(*args)
    lowered = traced.lower() if device is None else traced.lower(lowering_platforms=("cuda",))
    return lowered.compile().memory_analysis().temp_size_in_bytes


if __name__ == "__main__":
    [h100] = gpu_devices("h100")
    parts = loss_bytes, block_attention_bytes, document_attention_bytes
    sizes = {part.__name__: part(h100) for part in parts}
    print(json.dumps({**sizes, "loss_bytes_with_parent_term": loss_bytes(h100, parent_rank=64)}))
