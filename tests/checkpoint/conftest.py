"""Checkpoints on disk, and copies of them to spoil."""

import shutil

import pytest
from checkpoint_case import HEAD, TARGET, filled

from jetspec_jax.checkpoint import (
    save_draft_head,
    save_target,
)
from jetspec_jax.head import DraftHead
from jetspec_jax.target import TargetModel


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One target and one head on disk."""
    root = tmp_path_factory.mktemp("saved")
    save_target(root / "target", filled(TargetModel, TARGET))
    save_draft_head(root / "head", filled(DraftHead, HEAD))
    return root


@pytest.fixture
def target(saved, tmp_path):
    """A copy of the target's checkpoint, to spoil."""
    return shutil.copytree(saved / "target", tmp_path / "target")


@pytest.fixture
def head(saved, tmp_path):
    """A copy of the head's checkpoint, to spoil."""
    return shutil.copytree(saved / "head", tmp_path / "head")
