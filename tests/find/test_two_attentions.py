"""All attention of a model gets the rules that `attend` asks for by name."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from unannotated_lm import LM, Block, loss, shapes

import shardlib as sl
from shardlib.errors import MeshError
from shardlib.nn.attention import attend

ADAM = optax.adamw(1e-3)


class Attending(Block):
    """A block whose attention goes through `attend`, to half of the positions if `crosses`."""

    def __init__(self, dim, heads, rngs, *, crosses=False, context="auto"):
        super().__init__(dim, heads, rngs)
        self.crosses, self.context = crosses, context

    def __call__(self, x):
        y = self.norms[0](x)
        source = y[:, ::2] if self.crosses else y
        pairs = ((self.query, y), (self.key, source), (self.value, source))
        query, key, value = (part(z).reshape(*z.shape[:2], self.heads, -1) for part, z in pairs)
        mixed = attend(query, key, value, causal=not self.crosses, context=self.context)
        x = x + self.out(mixed.reshape(*x.shape))
        return x + self.down(jax.nn.silu(self.up(self.norms[1](x))))


class TwoKinds(LM):
    """Its blocks have different numbers of heads."""

    def __init__(self, rngs, *, dim=96, heads=(3, 4), crosses=False, context="auto"):
        super().__init__(rngs, dim=dim)
        first, second = heads
        options = {"crosses": crosses, "context": context}
        self.blocks = nnx.List(
            [Attending(dim, first, rngs), Attending(dim, second, rngs, **options)]
        )


def find(make, rows=4, length=16384, mesh="fsdp=4,tensor=2", **options):
    options = {"loss": loss, "optimizer": ADAM, "on": "8xh100", "mesh": mesh} | options
    return sl.find_rules(make, batch=shapes(rows, length), **options)


def test_heads_are_cut_wherever_they_divide():
    found = find(functools.partial(TwoKinds, dim=384), microbatches=1)
    activations = dict(found.rules.activations)
    assert activations["heads"] == activations["kv_heads"] == (("tensor",), ())
    assert "kv_heads" in str(found)


def test_attention_that_asks_to_share_rows_of_two_lengths_is_refused():
    """As in a run with devices along `context`."""
    make = functools.partial(TwoKinds, crosses=True, context="ring")
    with pytest.raises(MeshError, match=r"context='ring' is for self-attention"):
        find(make, length=256, mesh="fsdp=4,context=2")


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("heads", "crosses", "mesh"),
    [((3, 4), False, "fsdp=4,tensor=2"), ((4, 4), True, "fsdp=4,context=2")],
    ids=["heads", "keys of another length"],
)
def test_they_train_as_one_device(heads, crosses, mesh):
    found = find(functools.partial(TwoKinds, dim=384, heads=heads, crosses=crosses), mesh=mesh)
    small = functools.partial(TwoKinds, dim=96, heads=heads, crosses=crosses)
    draws = np.random.default_rng(0)
    batch = {name: draws.integers(0, 512, (8, 256), np.int32) for name in ("tokens", "targets")}
    rules = found.rules.at_other_sizes()
    sl.testing.assert_equivalent(small, loss, batch, [mesh], rules=rules, optimizer=ADAM)
