"""The target over packed documents, as training needs it: no cache, documents apart."""

from __future__ import annotations

import functools

from jetspec_jax.rope import rope_at
from jetspec_jax.target import TargetModel, TargetOutput
from train.attention import document_attention
from train.data import Packed


def target_forward(model: TargetModel, batch: Packed, tap_ids: tuple[int, ...] = ()) -> TargetOutput:
    """The target's outputs at every packed token, each seeing its own document up to itself."""
    attend = functools.partial(document_attention, documents=batch.documents)
    rope = rope_at(batch.positions, model.config)
    return model.run(model.embed(batch.tokens), rope, [attend] * model.config.num_hidden_layers, tap_ids)
