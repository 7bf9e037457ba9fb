"""Compiled programs, ahead of time: compilation is kept apart from running, so that running can be timed."""

from __future__ import annotations

import logging
import os
import pathlib
from typing import Any

import jax

_programs: dict[Any, jax.stages.Compiled] = {}


def compiled(function: Any, *args: Any, **static: Any) -> jax.stages.Compiled:
    """The executable of a jitted `function` for arguments like `args`; compiled at the first request.

    Call the result with the same arguments less the static ones. `args` hold arrays only (NumPy scalars included).
    Programs are kept by function, static arguments,
    and the structure, shapes and dtypes of `args`; never by values.
    """
    leaves, structure = jax.tree.flatten(args)
    shapes = tuple((leaf.shape, leaf.dtype, getattr(leaf, "sharding", None)) for leaf in leaves)
    key = (function, structure, shapes, tuple(sorted(static.items())))
    if key not in _programs:
        _programs[key] = function.lower(*args, **static).compile()
    return _programs[key]


def enable_compilation_cache(directory: str | os.PathLike[str] | None = None) -> pathlib.Path | None:
    """Turns on JAX's persistent compilation cache, so that a second start finds its programs compiled.

    The directory is `directory`, else `$XDG_CACHE_HOME/jetspec_jax`, else `~/.cache/jetspec_jax`. Where it cannot be
    made, a warning is logged, nothing is turned on, and the result is None.
    """
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    path = pathlib.Path(directory or pathlib.Path(base) / "jetspec_jax")
    try:
        path = path.expanduser()
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        logging.getLogger(__name__).warning("no compilation cache in %s: %s; set XDG_CACHE_HOME", path, error)
        return None
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return path
