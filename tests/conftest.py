"""Settings of every test: CPU, strict dtype and rank promotion, no silent fallbacks."""

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session", autouse=True)
def _compilation_cache_off():
    """Tests count compilations, so nothing may come from a cache on disk."""
    jax.config.update("jax_enable_compilation_cache", False)


@pytest.fixture(scope="module")
def compile_quickly():
    """For tests that spend their time compiling; programs optimised less mean the same and compile twice as fast."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def optax_promotes():
    """Optax multiplies integers with floats."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
