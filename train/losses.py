"""What a drafted distribution is held against: one loss per slot, from logits, in float32.

With p the target's and q the head's distribution of one token, both at the same temperature T:

| name | loss of a slot | |
|---|---|---|
| `forward_kl` | `T^2 KL(p \\|\\| q)` | the paper's |
| `reverse_kl` | `T^2 KL(q \\|\\| p)` | |
| `sft` | `-log q(the text's token)` | hard labels; T must be 1 |
| `total_variation` | `1 - alpha` | LK losses, |
| `log_acceptance` | `-log alpha` | arXiv 2602.23881 |

where `alpha = sum_v min(p_v, q_v)` is the chance that speculative sampling accepts a token drafted from q. T^2 keeps
the size of a KL's gradient, which falls with 1 / T^2.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

# (student [..., V], teacher [..., V], truth [...], temperature) -> [...]
SlotLoss = Callable[[jax.Array, jax.Array, jax.Array, float], jax.Array]


def forward_kl(student: jax.Array, teacher: jax.Array, truth: jax.Array, temperature: float) -> jax.Array:
    """`T^2 sum_v p_v (log p_v - log q_v)`."""
    log_q, log_p = _log_softmax(student, temperature), _log_softmax(teacher, temperature)
    return temperature**2 * jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def reverse_kl(student: jax.Array, teacher: jax.Array, truth: jax.Array, temperature: float) -> jax.Array:
    """`T^2 sum_v q_v (log q_v - log p_v)`."""
    return forward_kl(teacher, student, truth, temperature)


def sft(student: jax.Array, teacher: jax.Array, truth: jax.Array, temperature: float) -> jax.Array:
    """Cross-entropy of the text's own next token, `truth` int32 `[...]`."""
    logits = student.astype(jnp.float32)
    # A comparison with every word, not a gather: its gradient is no scatter, and words may be sharded.
    word = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    at_truth = jnp.sum(jnp.where(word == truth[..., None], logits, 0.0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - at_truth


def total_variation(student: jax.Array, teacher: jax.Array, truth: jax.Array, temperature: float) -> jax.Array:
    """`1 - alpha`, as `sum_v |p_v - q_v| / 2`, which does not cancel where alpha is near 1."""
    log_q, log_p = _log_softmax(student, temperature), _log_softmax(teacher, temperature)
    return 0.5 * jnp.sum(jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)), axis=-1)


def log_acceptance(student: jax.Array, teacher: jax.Array, truth: jax.Array, temperature: float) -> jax.Array:
    """`-log alpha`, from log-probabilities: finite, with a gradient, where alpha itself would be 0 in float32."""
    log_q, log_p = _log_softmax(student, temperature), _log_softmax(teacher, temperature)
    return -jax.nn.logsumexp(jnp.minimum(log_p, log_q), axis=-1)


LOSSES: dict[str, SlotLoss] = {
    loss.__name__: loss for loss in (forward_kl, reverse_kl, sft, total_variation, log_acceptance)
}


def check_loss(name: str, temperature: float) -> None:
    """Raises ValueError when there is no such loss, or it cannot use the temperature."""
    if name not in LOSSES:
        raise ValueError(f"unknown loss {name!r}; --config.loss is one of {', '.join(LOSSES)}")
    if temperature <= 0:
        raise ValueError(f"--config.temperature must be above 0, got {temperature}")
    if name == "sft" and temperature != 1:
        raise ValueError(
            f"--config.loss=sft learns the text's tokens, which have no temperature; set --config.temperature=1, "
            f"got {temperature}"
        )


def _log_softmax(logits: jax.Array, temperature: float) -> jax.Array:
    return jax.nn.log_softmax(logits.astype(jnp.float32) / temperature, axis=-1)
