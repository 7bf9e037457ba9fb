"""Shapes of public models, so that memory and time can be planned without any of their files."""

from __future__ import annotations

import dataclasses
import json
import pathlib

from jetspec_jax.config import DecoderConfig, HeadConfig, TargetConfig, default_target_layer_ids

_MASK_TOKEN = 151_669  # an id of Qwen3's vocabulary that no text has

TARGETS = {
    "qwen3-8b": TargetConfig(
        vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960,
    ),
    "qwen3-30b-a3b": TargetConfig(
        vocab_size=151_936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, max_position_embeddings=40_960, architecture="Qwen3MoeForCausalLM",
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
    ),
}  # fmt: skip
"""By the last part of the hub id, in lower case."""


def target_shape(name: str) -> TargetConfig:
    """The config of a target, from its `config.json` alone.

    Args:
        name: a directory with a config.json, or the name of one of `TARGETS`, as it is or as a hub id
            ("Qwen/Qwen3-8B").

    Raises:
        ValueError: there is neither, or the file describes no target.
    """
    file = pathlib.Path(name).expanduser() / "config.json"
    if name and file.is_file():
        try:
            return TargetConfig.from_hf(json.loads(file.read_text()))
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
    known = name.lower().rpartition("/")[2]
    if known in TARGETS:
        return TARGETS[known]
    raise ValueError(f"no shapes for the target {name!r}: give a directory with a config.json, or {', '.join(TARGETS)}")


def head_shape(
    target: TargetConfig,
    num_hidden_layers: int = 5,
    block_size: int = 16,
    target_layer_ids: tuple[int, ...] = (),
    parent_rank: int = 0,
) -> HeadConfig:
    """A causal head in the shape of the target's own layers, as published ones are; no taps means those by default."""
    shared = {field.name: getattr(target, field.name) for field in dataclasses.fields(DecoderConfig)}
    return HeadConfig(
        **{**shared, "num_hidden_layers": num_hidden_layers},
        block_size=block_size,
        num_target_layers=target.num_hidden_layers,
        mask_token_id=min(_MASK_TOKEN, target.vocab_size - 1),
        causal_head=True,
        target_layer_ids=target_layer_ids or default_target_layer_ids(target.num_hidden_layers, num_hidden_layers),
        parent_rank=parent_rank,
    )
