"""How much arithmetic a training step needs, whatever the program that does it does beside: what MFU is measured by."""

from __future__ import annotations

from jetspec_jax.config import DecoderConfig, HeadConfig, TargetConfig


def step_flops(target: TargetConfig, head: HeadConfig, *, rows: int, length: int, anchors: int) -> float:
    """Model FLOPs of one step, two a multiply-add, of matrix products and attention alone.

    The target's forward; the head's forward and its backward, twice that, all of it being trained; lm_head's three
    products a supervised slot (student, teacher, and back from the student's logits) and as many of a parent term
    (there, and back to both its tables). Attention counts the pairs that the masks let through, with one document a row
    and anchors spread evenly over it. Experts count where a token is sent. Nothing is counted that is computed again in
    the backward pass.

    Args:
        rows: of the whole batch, each of `length` tokens and `anchors` blocks.
    """
    words = (target.hidden_size + head.parent_rank) * target.vocab_size
    return rows * (
        _target(target, length)
        + _head(head, length, anchors)
        + anchors * (head.block_size - 1 + head.mixed_fill) * 3 * 2 * words
    )


def _target(config: TargetConfig, length: int) -> float:
    """One row through the target's layers."""
    dense = 3 * config.hidden_size * config.intermediate_size
    sparse = config.hidden_size * config.num_experts
    sparse += config.num_experts_per_tok * 3 * config.hidden_size * config.moe_intermediate_size
    mlps = sum(sparse if config.is_sparse(layer) else dense for layer in range(config.num_hidden_layers))
    projections = config.num_hidden_layers * (_query_and_output(config) + _key_and_value(config))
    scored = config.num_hidden_layers * _attention(config, length * (length + 1) / 2)
    return 2 * length * (mlps + projections) + scored


def _head(config: HeadConfig, length: int, anchors: int) -> float:
    """One row's blocks through the head and back. `fc` needs no gradient with respect to its input, the taps."""
    size = config.block_size
    fuse = 2 * length * len(config.target_layer_ids) * config.hidden_size**2
    context = 2 * length * _key_and_value(config)
    weights = _query_and_output(config) + _key_and_value(config) + 3 * config.hidden_size * config.intermediate_size
    slots = 2 * anchors * size * weights
    within = size * (size + 1) / 2 if config.causal_head else size * size
    scored = _attention(config, anchors * (size * (length - 1) / 2 + within))
    return 2 * fuse + 3 * config.num_hidden_layers * (context + slots + scored)


def _query_and_output(config: DecoderConfig) -> int:
    """Parameters of q_proj and o_proj."""
    return 2 * config.hidden_size * config.num_attention_heads * config.head_dim


def _key_and_value(config: DecoderConfig) -> int:
    """Parameters of k_proj and v_proj."""
    return 2 * config.hidden_size * config.num_key_value_heads * config.head_dim


def _attention(config: DecoderConfig, pairs: float) -> float:
    """Scores of so many pairs of query and key, and sums of values, in all heads of a layer."""
    return 2 * 2 * config.num_attention_heads * config.head_dim * pairs
