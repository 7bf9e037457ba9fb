"""What a training run writes and when, around steps that are stand-ins: nothing is compiled."""

import pytest
from tiny import head_config, random_module

from jetspec_jax.checkpoint import load_head_model
from jetspec_jax.head import DraftHead
from train.checkpoints import export


@pytest.fixture(scope="module")
def head():
    return random_module(DraftHead, head_config(64), 0)


def test_a_head_is_written_where_a_kill_left_part_of_one(head, tmp_path):
    """The weights' temporary file has a name of its own every time."""
    (tmp_path / ".export").mkdir()
    (tmp_path / ".export" / ".tmpXb2kQp").write_text("half")
    export(tmp_path, head)
    assert load_head_model(tmp_path, None).config == head.config
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
