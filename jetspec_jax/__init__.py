"""Lossless speculative decoding with causal parallel draft trees.

import jetspec_jax
target = jetspec_jax.load_target()
head = jetspec_jax.load_draft_head(target=target)
[result] = jetspec_jax.generate(target, head, [jetspec_jax.chat_prompt(target, "...")], budget=64)
"""

from jetspec_jax.chat import chat_prompt
from jetspec_jax.checkpoint import CheckpointError, save_draft_head, save_target
from jetspec_jax.compiled import enable_compilation_cache
from jetspec_jax.engine import GenerationConfig, GenerationResult, Progress, generate
from jetspec_jax.models import Target, load_draft_head, load_target
from jetspec_jax.sharding import make_mesh

__all__ = [
    "CheckpointError",
    "GenerationConfig",
    "GenerationResult",
    "Progress",
    "Target",
    "chat_prompt",
    "enable_compilation_cache",
    "generate",
    "load_draft_head",
    "load_target",
    "make_mesh",
    "save_draft_head",
    "save_target",
]
