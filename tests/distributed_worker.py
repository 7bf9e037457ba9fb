"""One step over eight rows, by one process or several: `distributed_worker.py OUT MESH [COORDINATOR ID COUNT]`.

Process 0 writes the gradients and the loss to OUT (.npz). Without a coordinator one process has all devices.
"""

import sys

import jax
import numpy as np
from jax.experimental import multihost_utils

from jetspec_jax.sharding import use
from train import distributed
from train.placing import place_rows, share_of_rows, training_mesh
from train.step import Objective, train_step


def main(out, mesh="", coordinator=None, process=None, count=None):
    jax.config.update("jax_disable_most_optimizations", True)
    number = lambda text: None if text is None else int(text)  # noqa: E731
    joined = distributed.join(coordinator, number(process), number(count), "none", timeout=60)
    assert joined == (coordinator is not None)
    from test_step import KEEPS_GRADIENTS, placed, rows  # makes arrays, so that the processes must have met

    mesh = training_mesh(mesh)
    index, parts = share_of_rows(8, mesh)
    assert parts == int(count or 1)
    # Each process has rows of its own only, as from its own shard of the data.
    mine = jax.tree.map(lambda x: np.split(x, parts)[index], rows(8))
    state, target = placed(mesh)
    with use(mesh):
        batch, blocks = place_rows(mine, mesh)
        state, metrics = train_step(
            state, target, batch, blocks, optimizer=KEEPS_GRADIENTS, objective=Objective(gamma=3.0, temperature=2.0)
        )
    gathered = multihost_utils.process_allgather((state.optimizer.trace, metrics.blocks.loss), tiled=True)
    if jax.process_index() == 0:
        gradients, loss = gathered
        np.savez(out, *jax.tree.leaves(gradients), loss=loss, devices=jax.device_count())


if __name__ == "__main__":
    main(*sys.argv[1:])
