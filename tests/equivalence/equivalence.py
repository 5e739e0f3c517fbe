"""The same training on any mesh: what the tests of this folder share."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

import shardlib as sl
from shardlib.paths import named_leaves
from shardlib.registry import family

# Sums of float32 numbers in another order differ by a few times 2**-24 of the largest term, per
# level of the reduction; 30 steps of an optimizer carry that on.
RELATIVE = 1e-5


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its loss and its batches."""

    make: Callable[..., Any]
    loss: Callable[..., Any]
    batches: list[dict[str, np.ndarray]]
    batch_axes: Any

    def train(self, mesh, optimizer, *, num_devices=8, microbatches=1):
        """Trains on all batches, on a mesh, in one compiled program."""
        mesh = sl.make_mesh(mesh, devices=jax.devices()[:num_devices])
        with sl.use(mesh, sl.rules.STANDARD):
            state = sl.init_state(self.make, optax.chain(record_gradients(), optimizer), seed=0)
        step = sl.make_train_step(self.loss, batch_axes=self.batch_axes, microbatches=microbatches)
        initial, first, losses = jax.device_get(state), None, []
        compiled = step.lower(state, self.batches[0]).compile()
        for batch in self.batches:
            state, metrics = compiled(state, batch)
            losses.append(float(metrics["loss"]))
            first = first or jax.device_get(state)
        return Result(mesh, initial, first, losses, compiled.as_text())


@dataclasses.dataclass(frozen=True)
class Result:
    """A training on one mesh: states before and after the first step, losses, the program."""

    mesh: Any
    initial: sl.TrainState
    first: sl.TrainState
    losses: list[float]
    program: str

    @property
    def gradients(self):
        """The gradients of the first step."""
        return self.first.opt_state[0]


def assert_leaves_close(tree, expected, relative=RELATIVE):
    """Every leaf within `relative` of the largest magnitude of the expected leaf."""
    found, wanted = named_leaves(jax.device_get(tree)), named_leaves(jax.device_get(expected))
    assert found.keys() == wanted.keys()
    far = {}
    for path, value in wanted.items():
        error = np.abs(np.asarray(found[path], np.float64) - value).max(initial=0)
        scale = np.abs(value).max(initial=0)
        if error > relative * scale:
            far[path] = (error, scale)
    assert not far, "\n".join(f"{path}: off by {e:.1e} of {s:.1e}" for path, (e, s) in far.items())


def record_gradients():
    """An optimizer that changes nothing and whose state is the gradients of the last step."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jax.numpy.zeros_like, params),
        lambda grads, state, params: (grads, grads),
    )


def packed_batch(rng, batch, length, vocab):
    """Returns random rows of up to three documents each, and two positions of padding."""
    segments = np.sort(rng.integers(1, 4, (batch, length)), axis=1).astype(np.int32)
    segments[:, -2:] = 0
    starts = np.stack([np.searchsorted(row[:-2], row) for row in segments])
    positions = np.where(segments > 0, np.arange(length)[None] - starts, 0).astype(np.int32)
    return {
        "tokens": rng.integers(0, vocab, (batch, length), dtype=np.int32),
        "targets": rng.integers(0, vocab, (batch, length), dtype=np.int32),
        "segment_ids": segments,
        "positions": positions,
        "num_bytes": np.full(batch, 3 * length, np.int32),
    }


def make_task(name, config, data, batches, batch_axes):
    """Returns a task of a model family."""
    chosen = family(name)
    assert chosen.validate(config, data) == []
    return Task(
        lambda rngs: chosen.make(config, data, rngs),
        lambda model, batch, rng: chosen.loss(model, batch, rng, train=True),
        batches,
        batch_axes,
    )
