"""Which models the commands run: flags, and loading by them."""

from __future__ import annotations

import argparse

import jetspec_jax
from jetspec_jax.models import EMBEDDED_TARGET, Target
from jetspec_jax.sharding import check_batch
from kernels.pallas.tree_attention import BACKENDS


def add_model_flags(parser: argparse.ArgumentParser, **draft_head: object) -> None:
    """The flags that say which models to run, and how; `draft_head` is what `--draft-head` has of its own."""
    models = parser.add_argument_group("models")
    models.add_argument(
        "--model",
        default=EMBEDDED_TARGET,
        metavar="DIR|ID",
        help="the target: a directory or a hub id, ::subfolder allowed (default: the small model that ships here)",
    )
    models.add_argument("--draft-head", metavar="DIR|ID", **draft_head)  # type: ignore[arg-type]
    models.add_argument("--revision", help="of a hub --model: a branch, tag or commit (default: its main branch)")
    models.add_argument("--draft-head-revision", metavar="REVISION", help="likewise of a hub --draft-head")
    models.add_argument(
        "--mesh",
        metavar="AXIS=SIZE,...",
        help="devices to split target and head over, such as data=1,model=4; axes: data (batch), model (heads, MLPs, "
        "vocabulary), expert, fsdp (batch and weights)",
    )
    models.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: the checkpoint's")
    models.add_argument(
        "--attention",
        choices=BACKENDS,
        default="auto",
        help="what computes attention: a Pallas kernel where one serves and XLA elsewhere, or one of them "
        "(pallas is interpreted, and slow, on a CPU; default %(default)s)",
    )
    models.add_argument(
        "--no-compilation-cache",
        action="store_true",
        help="do not keep compiled programs in $XDG_CACHE_HOME/jetspec_jax",
    )


def load_target(args: argparse.Namespace) -> Target:
    """The target that the flags name, split as they say.

    Raises:
        ValueError: it cannot be loaded, or target or batches cannot be split over the mesh.
    """
    mesh = None if args.mesh is None else jetspec_jax.make_mesh(args.mesh)
    if mesh is not None:
        check_batch(args.batch_size, mesh)
    return jetspec_jax.load_target(args.model, dtype=args.dtype, mesh=mesh, revision=args.revision)
