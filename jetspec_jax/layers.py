"""The blocks that the target and the draft head are built of (Qwen3), as NNX modules.

Modules are pytrees of arrays: they go through `jax.jit`, `jax.grad` and `jax.eval_shape` as they are. Their
attribute paths are the Hugging Face tensor names; only a linear layer's `weight` `[out, in]` is a `kernel` `[in, out]`
here, which XLA multiplies faster.

Axis letters: B batch, N block rows, H query heads, K kv heads, D head_dim, E hidden features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jetspec_jax.config import DecoderConfig

# (query [B, N, H, D], key [B, N, K, D], value [B, N, K, D]) -> [B, N, H, D]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class KeyValue(NamedTuple):
    """One layer's keys and values, each `[B, N, K, D]`; keys are normalised and rotated."""

    key: jax.Array
    value: jax.Array


class Rope(NamedTuple):
    """Cosines and sines of rotary angles, each float32 `[B, N, D / 2]`."""

    cos: jax.Array
    sin: jax.Array


def rope_at(positions: jax.Array, config: DecoderConfig) -> Rope:
    """Rotary angles, in float32, of absolute `positions` `[B, N]`."""
    exponent = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    angles = positions[..., None].astype(jnp.float32) * (1.0 / config.rope_theta**exponent)[None, None]
    return Rope(jnp.cos(angles), jnp.sin(angles))


def rotate(x: jax.Array, rope: Rope) -> jax.Array:
    """`x` `[B, N, heads, D]` rotated by `rope`: feature i pairs with feature i + D/2."""
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    cos, sin = rope.cos[:, :, None, None], rope.sin[:, :, None, None]
    # The partner of each half is the other one: a reversal fuses into one loop, which a concatenation does not.
    signed = jnp.concatenate([-sin, sin], axis=-2)
    return (halves * cos + halves[..., ::-1, :] * signed).reshape(x.shape).astype(x.dtype)


class Linear(nnx.Module):
    """`x @ kernel` with `kernel` `[in, out]` and no bias."""

    def __init__(self, in_features: int, out_features: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        scale = in_features**-0.5
        self.kernel = nnx.Param(jax.random.normal(rngs(), (in_features, out_features), dtype) * scale)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., out]` of `x` `[..., in]`."""
        # One matrix product over flattened rows: XLA's gradient of the batched form transposes its operands.
        flat = x.reshape(-1, x.shape[-1]) @ self.kernel[...]
        return flat.reshape(*x.shape[:-1], -1)


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
    """Grouped-query attention with per-head q/k RMSNorm; what is attended to is the caller's `attend`."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        query = config.num_attention_heads * config.head_dim
        shared = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, query, rngs=rngs, dtype=dtype)
        self.k_proj = Linear(config.hidden_size, shared, rngs=rngs, dtype=dtype)
        self.v_proj = Linear(config.hidden_size, shared, rngs=rngs, dtype=dtype)
        self.o_proj = Linear(query, config.hidden_size, rngs=rngs, dtype=dtype)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype)
        self.head_dim = config.head_dim

    def keys_values(self, x: jax.Array, rope: Rope) -> KeyValue:
        """Keys (normalised, rotated) and values of `x` `[B, N, E]`."""
        key = self._split(self.k_proj(x))
        return KeyValue(rotate(self.k_norm(key), rope), self._split(self.v_proj(x)))

    def __call__(self, x: jax.Array, rope: Rope, attend: Attend) -> tuple[jax.Array, KeyValue]:
        """Attention output `[B, N, E]` for `x` `[B, N, E]`, and x's own keys and values."""
        query = rotate(self.q_norm(self._split(self.q_proj(x))), rope)
        own = self.keys_values(x, rope)
        out = attend(query, own.key, own.value)
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
    """A pre-norm Qwen3 layer: attention and MLP, each added to the residual stream."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.self_attn = Attention(config, rngs=rngs, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(config, rngs=rngs, dtype=dtype)

    def __call__(self, x: jax.Array, rope: Rope, attend: Attend) -> tuple[jax.Array, KeyValue]:
        """The layer's output `[B, N, E]`, and the keys and values of its input rows."""
        attended, own = self.self_attn(self.input_layernorm(x), rope, attend)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), own
