"""Rows are cut over `context` where attention goes through `attend` and that is worth it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from unannotated_lm import LM, Block, loss, shapes

import shardlib as sl
from shardlib.errors import MeshError
from shardlib.nn.attention import attend
from shardlib.nn.attention.as_one import attention_as_one
from shardlib.registry import DataSpec
from shardlib_models.transformer import FAMILY
from shardlib_models.transformer_config import TransformerConfig

ADAM = optax.adamw(1e-3)
NAMED = functools.partial(FAMILY.loss, train=True)
LENGTH = 65536


def named(rngs, dim=1536, heads=12, kv_heads=3, length=LENGTH):
    sizes = {"embed_dim": dim, "num_heads": heads, "num_kv_heads": kv_heads, "mlp_dim": 4 * dim}
    config = TransformerConfig(num_layers=2, **sizes)
    return FAMILY.make(config, DataSpec(vocab_size=512, sequence_length=length), rngs)


def find(make=named, rows=2, length=LENGTH, **options):
    options = {"loss": NAMED, "optimizer": ADAM, "on": "8xh100"} | options
    return sl.find_rules(make, batch=shapes(rows, length), **options)


@pytest.mark.mesh
def test_long_rows_whose_heads_do_not_divide_are_shared():
    """Context parallelism: Grattafiori et al. 2024, section 3.3.2. Two rows cannot be cut over
    eight devices, nor three key-value heads over two of them."""
    found = find()
    assert found.sizes["context"] == 4
    activations = dict(found.rules.activations)
    assert activations["length"] == activations["residual_length"] == (("context",),)
    assert activations["batch"] == (("fsdp",),)
    assert not any("context" in cuts[0] for _, cuts in found.rules.params)


@pytest.mark.mesh
def test_short_rows_are_not_shared():
    found = find(functools.partial(named, length=512), rows=64, length=512)
    assert found.sizes["context"] == 1


def test_a_mesh_with_context_needs_attention_that_shares_rows():
    with pytest.raises(MeshError, match=r"LM cannot cut.*no self-attention.*\n  Leave context out"):
        find(LM, loss=loss, rows=16, length=512, mesh="fsdp=4,context=2")
    short = functools.partial(named, length=100)
    with pytest.raises(MeshError, match=r"context=8: 8 devices do not divide rows of 100"):
        find(short, rows=16, length=100, mesh="context=8")


@pytest.mark.mesh
@pytest.mark.rest("soak")
@pytest.mark.parametrize(
    ("mesh", "microbatches", "kv_heads"),
    [("data=2,context=2,tensor=2", 2, 4), ("fsdp=2,context=4", 1, 3)],
)
def test_they_train_as_one_device(mesh, microbatches, kv_heads):
    make = functools.partial(named, kv_heads=kv_heads)
    found = find(make, 8, mesh=mesh, microbatches=microbatches)
    small = functools.partial(named, dim=48, kv_heads=kv_heads, length=256)
    ids = np.random.default_rng(0)
    batch = {name: ids.integers(0, 512, (8, 256), np.int32) for name in ("tokens", "targets")}
    options = {"rules": found.rules, "optimizer": ADAM, "microbatches": microbatches}
    sl.testing.assert_equivalent(small, NAMED, batch, [mesh], **options)


@pytest.mark.mesh
def test_what_devices_share_is_that_of_the_compiled_program():
    """Keys and values go around the ring, with their gradients in the backward pass."""
    make, mesh = functools.partial(named, length=4096), "fsdp=2,context=4"
    found = find(make, length=4096, mesh=mesh, precision="f32")
    with sl.use(sl.make_mesh(mesh), found.rules):
        state = sl.abstract_state(make, ADAM)
        report = sl.explain(sl.make_train_step(NAMED), state, shapes(2, 4096))
    for kind in ("collective-permute", "all-reduce"):
        shared = (one for one in report.collectives if one.mesh_axes == ("context",))
        true = sum(one.folded_bytes for one in shared if one.kind == kind)
        assert found.traffic[kind, ("context",)] == pytest.approx(true, rel=0.02), kind


class SharedBlock(Block):
    """A block whose attention goes through `attend`."""

    def __call__(self, x):
        y = self.norms[0](x)
        parts = [part(y) for part in (self.query, self.key, self.value)]
        query, key, value = (p.reshape(*p.shape[:2], self.heads, -1) for p in parts)
        mixed = attend(query, key, value)
        x = x + self.out(mixed.reshape(*x.shape))
        return x + self.down(jax.nn.silu(self.up(self.norms[1](x))))


class Unnamed(LM):
    """It names no axes."""

    def __init__(self, rngs, dim=128):
        super().__init__(rngs, dim=dim)
        self.blocks = nnx.List([SharedBlock(dim, 4, rngs) for _ in range(2)])


@pytest.mark.mesh
@pytest.mark.rest("soak")
@pytest.mark.parametrize(
    ("mesh", "length"),
    [
        ("fsdp=2,context=4", 4096),
        ("fsdp=4,tensor=2", 512),
        ("fsdp=2,context=2,tensor=2", 4096),
    ],
)
def test_a_model_without_names_shares_rows_too(mesh, length):
    """`attend` asks for the rules of positions and heads by name. shardlib partitions the program
    around its region, and not XLA. In float32, because CPU devices send bfloat16 as that."""
    make = functools.partial(Unnamed, dim=1024)
    found = find(make, 8, length, loss=loss, mesh=mesh, precision="f32")
    activations = dict(found.rules.activations)
    assert {"length", "heads", "kv_heads", "head_dim"} <= set(activations)
    assert (activations["length"] == (("context",),)) == ("context" in mesh)
    ids = np.random.default_rng(0)
    batch = {name: ids.integers(0, 512, (8, 256), np.int32) for name in ("tokens", "targets")}
    rules = found.rules.at_other_sizes()
    sl.testing.assert_equivalent(Unnamed, loss, batch, [mesh], rules=rules, optimizer=ADAM)
    with sl.use(sl.make_mesh(mesh), found.rules):
        state = sl.abstract_state(make, ADAM)
        step = sl.make_train_step(loss)
        assert step.partition(state, shapes(8, length)).by == "shardlib"
        report = sl.explain(step, state, shapes(8, length))
    sent = sum(one.folded_bytes for one in report.collectives)
    # CPU devices gather parameters again behind loops.
    assert sum(found.traffic.values()) == pytest.approx(sent, rel=0.15)


def test_attention_as_one_operation_never_runs():
    """JAX would otherwise keep the trace of a function of the user's own."""
    step = jax.jit(lambda x: attend(x, x, x))
    x = jnp.ones((2, 128, 4, 16), jnp.float32)
    with attention_as_one("gpu", "rows"):
        assert "shared_over_rows" in str(jax.make_jaxpr(step)(x))
    assert step(x).shape == x.shape
