"""The blocks that the target and the draft head are built of (Qwen3, Llama), as NNX modules.

Modules are pytrees of arrays: they go through `jax.jit`, `jax.grad` and `jax.eval_shape` as they are. Their
attribute paths are the Hugging Face tensor names, and their arrays lie as the files have them.

Axis letters: B batch, N block rows, H query heads, K kv heads, D head_dim, E hidden features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jetspec_jax.config import DecoderConfig
from jetspec_jax.ops import project
from jetspec_jax.rope import Rope, rotate
from jetspec_jax.sharding import constrain

# (query [B, N, H, D], key [B, N, K, D], value [B, N, K, D]) -> [B, N, H, D]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class KeyValue(NamedTuple):
    """One layer's keys and values, each `[B, N, K, D]`; keys are normalised and rotated."""

    key: jax.Array
    value: jax.Array


class Linear(nnx.Module):
    """`x @ weight.T + bias` with `weight` `[out, in]` and `bias` `[out]`, which most have not."""

    def __init__(
        self, in_features: int, out_features: int, *, rngs: nnx.Rngs, dtype: jnp.dtype, use_bias: bool = False
    ):
        scale = in_features**-0.5
        self.weight = nnx.Param(jax.random.normal(rngs(), (out_features, in_features), dtype) * scale)
        if use_bias:
            self.bias = nnx.Param(jnp.zeros((out_features,), dtype))
        self.use_bias = use_bias

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., out]` of `x` `[..., in]`."""
        out = project(x, self.weight[...])
        return out + self.bias[...].reshape((1,) * (out.ndim - 1) + (-1,)) if self.use_bias else out


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation over the last axis, computed in float32."""

    def __init__(self, features: int, eps: float, *, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones((features,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """`x` `[..., features]`, normalised and scaled, in its own dtype."""
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return jax.lax.mul(x32.astype(x.dtype), jnp.broadcast_to(self.weight[...], x.shape))


class Attention(nnx.Module):
    """Grouped-query attention, with per-head q/k RMSNorm or none; what is attended to is the caller's `attend`."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        query = config.num_attention_heads * config.head_dim
        shared = config.num_key_value_heads * config.head_dim
        linear = functools.partial(Linear, rngs=rngs, dtype=dtype, use_bias=config.has_attention_bias)
        self.q_proj = linear(config.hidden_size, query)
        self.k_proj = linear(config.hidden_size, shared)
        self.v_proj = linear(config.hidden_size, shared)
        self.o_proj = linear(query, config.hidden_size)
        if config.has_qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype)
        self.has_qk_norm = config.has_qk_norm
        self.head_dim = config.head_dim

    def keys_values(self, x: jax.Array, rope: Rope) -> KeyValue:
        """Keys (normalised, rotated) and values of `x` `[B, N, E]`."""
        key = self._split(self.k_proj(x))
        key = self.k_norm(key) if self.has_qk_norm else key
        return KeyValue(rotate(key, rope), self._split(self.v_proj(x)))

    def __call__(self, x: jax.Array, rope: Rope, attend: Attend) -> tuple[jax.Array, KeyValue]:
        """Attention output `[B, N, E]` for `x` `[B, N, E]`, and x's own keys and values."""
        query = self._split(self.q_proj(x))
        query = self.q_norm(query) if self.has_qk_norm else query
        own = self.keys_values(x, rope)
        out = attend(rotate(query, rope), own.key, own.value)
        return self.o_proj(out.reshape(*out.shape[:2], -1)), own

    def _split(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, self.head_dim)


class MLP(nnx.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, rngs=rngs, dtype=dtype)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, rngs=rngs, dtype=dtype)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, rngs=rngs, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., E]` of `x` `[..., E]`."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nnx.Module):
    """A pre-norm layer: attention and what `mlp` makes, each added to the residual stream."""

    def __init__(
        self,
        config: DecoderConfig,
        mlp: Callable[..., Callable[[jax.Array], jax.Array]] = MLP,
        *,
        rngs: nnx.Rngs,
        dtype: jnp.dtype,
    ):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.self_attn = Attention(config, rngs=rngs, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp = mlp(config, rngs=rngs, dtype=dtype)

    def __call__(self, x: jax.Array, rope: Rope, attend: Attend) -> tuple[jax.Array, KeyValue]:
        """The layer's output `[B, N, E]`, and the keys and values of its input rows."""
        attended, own = self.self_attn(self.input_layernorm(x), rope, attend)
        x = constrain(x + attended, "batch", None, None)
        return constrain(x + self.mlp(self.post_attention_layernorm(x)), "batch", None, None), own
