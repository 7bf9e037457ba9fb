"""What a run is made of: the head that a config describes, and the token of its empty slots."""

import dataclasses
import pathlib

import pytest
from tiny import target_config

from jetspec_jax import Target
from jetspec_jax.config import TargetConfig
from train.config import DistillConfig
from train.setup import check_length, head_layout, with_mask_token


class Tokenizer:
    """As much of a tokenizer as is looked at."""

    def __init__(self, words, mask_token_id=None):
        self.words, self.mask_token_id = words, mask_token_id

    def __len__(self):
        return self.words


class Model:
    config = target_config(64)


def mask_of(tokenizer, **fields):
    target = Target(Model(), tokenizer, (), pathlib.Path("somewhere"))
    return with_mask_token(DistillConfig(**fields), target).mask_token_id


def test_the_mask_token_is_the_configs_or_the_tokenizers_or_the_first_free_embedding():
    """Qwen3's tokenizers have no mask token, and fewer words than there are embeddings."""
    assert mask_of(Tokenizer(60, mask_token_id=7), mask_token_id=5) == 5
    assert mask_of(Tokenizer(60, mask_token_id=7)) == 7
    assert mask_of(Tokenizer(60)) == 60
    for tokenizer in (Tokenizer(64), None):
        with pytest.raises(ValueError, match=r"somewhere: .* set --config.mask_token_id to a reserved one"):
            mask_of(tokenizer)


def test_rows_are_no_longer_than_the_target_reads():
    limit = target_config(64).max_position_embeddings
    check_length(DistillConfig(length=limit), target_config(64))
    with pytest.raises(ValueError, match=rf"--config\.length={limit + 1} is over the {limit} tokens"):
        check_length(DistillConfig(length=limit + 1), target_config(64))


def test_a_head_has_the_targets_own_shape_rotary_scaling_included():
    """All that the two share, and the config's own fields."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    shape = TargetConfig.from_hf({**target_config(64).to_hf(), "rope_scaling": scaling})
    assert shape.rope_scaling is not None
    config = DistillConfig(num_hidden_layers=1, target_layer_ids=(0,), parent_rank=2, causal_head=False, mixed_fill=0.0,
                           mask_token_id=9)  # fmt: skip
    layout = head_layout(config, shape)
    for name in ("rope_scaling", "rope_theta", "hidden_size", "num_key_value_heads", "max_position_embeddings"):
        assert getattr(layout, name) == getattr(shape, name)
    assert (layout.num_hidden_layers, layout.target_layer_ids, layout.parent_rank) == (1, (0,), 2)
    assert (layout.causal_head, layout.mask_token_id, layout.num_target_layers) == (False, 9, shape.num_hidden_layers)
    with pytest.raises(ValueError, match=r"--config\.mixed_fill needs a causal head"):
        head_layout(dataclasses.replace(config, mixed_fill=0.5), shape)
