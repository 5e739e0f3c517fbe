"""The search offers the layouts of attention that a run accepts, at their price."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from unannotated_lm import shapes

import shardlib as sl
from shardlib.errors import MeshError, ModelError, RuleError
from shardlib.jaxprs import equations
from shardlib.mesh import abstract_mesh
from shardlib.nn.attention import attend, plan_context
from shardlib.nn.attention.as_one import attention_as_one
from shardlib.registry import DataSpec
from shardlib.rules import STANDARD
from shardlib.sharding.shared_rows import OPAQUE
from shardlib_models.transformer import FAMILY
from shardlib_models.transformer_config import TransformerConfig

ADAM = optax.adamw(1e-3)
NAMED = functools.partial(FAMILY.loss, train=True)


def named(rngs, heads=4, kv_heads=4, length=4096, dim=None, **options):
    sizes = {"embed_dim": dim or 128 * heads, "num_heads": heads, "num_kv_heads": kv_heads}
    config = TransformerConfig(num_layers=2, mlp_dim=4 * sizes["embed_dim"], **sizes, **options)
    return FAMILY.make(config, DataSpec(vocab_size=512, sequence_length=length), rngs)


def find(make, rows=2, length=4096, **options):
    options = {"loss": NAMED, "optimizer": ADAM, "on": "8xh100"} | options
    return sl.find_rules(make, batch=shapes(rows, length), **options)


def as_one(heads=4, kv_heads=4, length=4096, kv_length=None, **options):
    """Returns what attention stands for as one operation on a GPU."""
    query, key = (
        jax.ShapeDtypeStruct((2, positions, count, 16), jnp.bfloat16)
        for positions, count in ((length, heads), (kv_length or length, kv_heads))
    )
    with attention_as_one("gpu", "rows"):
        program = jax.make_jaxpr(lambda q, k: attend(q, k, k, **options))(query, key)
    (one,) = (e for e, _ in equations(program.jaxpr) if e.primitive.name == OPAQUE)
    return one.params["what"][0]


OPTIONS = [
    {},
    {"context": "gather"},
    {"context": "ring", "backend": "cudnn"},
    {"context": "ulysses"},
    {"backend": "cudnn"},
    {"order": "zigzag"},
    {"context": "ulysses", "order": "zigzag"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_search_refuses_what_a_run_refuses(options):
    ran = set()
    for heads, kv_heads in ((4, 4), (6, 2), (8, 2)):
        for shards, parts, length in itertools.product((2, 4), (1, 2), (1024, 1030, 130, 97)):
            mesh = abstract_mesh(f"context={shards},tensor={parts}", shards * parts)
            try:
                with sl.use(mesh, STANDARD):
                    plan_context(length, heads, kv_heads, **{"order": "contiguous"} | options)
            except (ModelError, RuleError):
                runs = False
            else:
                runs = True
            faults = as_one(heads, kv_heads, length, **options).faults(shards, parts)
            assert runs == (not faults), (heads, kv_heads, shards, parts, length, faults)
            ran.add(runs)
    never = options.get("context") == "ring" and options.get("backend") == "cudnn"
    assert ran == ({False} if never else {True, False})


def test_devices_that_share_a_head_get_copies_of_it_by_ulysses():
    def copies(heads, kv_heads, *counts, context="ulysses"):
        return as_one(heads, kv_heads, context=context).key_copies(*counts)

    assert copies(4, 2, 4) == 2
    assert copies(8, 2, 4, 2) == 4
    # A device's three query heads may share several: it gets one for each.
    assert copies(12, 3, 4) == 4
    # Heads over `tensor` share one already.
    assert copies(8, 2, 2, 4) == 2
    assert copies(8, 4, 4) == copies(4, 2, 4, context="ring") == 1


@pytest.mark.mesh
def test_what_ulysses_sends_is_that_of_the_compiled_program():
    """Two key-value heads are sent to four devices, as a copy for each."""
    make, mesh = functools.partial(named, kv_heads=2, context="ulysses"), "fsdp=2,context=4"
    found = find(make, mesh=mesh, precision="f32")
    assert dict(found.rules.activations)["length"] == (("context",),)
    with sl.use(sl.make_mesh(mesh), found.rules):
        state = sl.abstract_state(make, ADAM)
        report = sl.explain(sl.make_train_step(NAMED), state, shapes(2, 4096))
    shared = [one for one in report.collectives if one.mesh_axes == ("context",)]
    true = sum(one.folded_bytes for one in shared if one.kind == "all-to-all")
    assert found.traffic["all-to-all", ("context",)] == pytest.approx(true, rel=0.02)


def test_six_heads_are_too_few_for_ulysses_on_four_devices():
    six = functools.partial(named, heads=6, kv_heads=6, context="ulysses", length=256)
    with pytest.raises(MeshError, match=r"6 heads cannot be divided over 4 devices"):
        find(six, length=256, mesh="fsdp=2,context=4")


def test_heads_that_tensor_cuts_are_too_few_for_ulysses():
    found = find(functools.partial(named, context="ulysses"), mesh="context=4,tensor=2")
    activations = dict(found.rules.activations)
    assert (activations["heads"], activations["length"]) == (((),), (("context",),))


@pytest.mark.mesh
def test_ulysses_trains_as_one_device_under_found_rules():
    mesh = "fsdp=2,context=2,tensor=2"
    found = find(functools.partial(named, kv_heads=2, context="ulysses"), 8, mesh=mesh)
    assert dict(found.rules.activations)["length"] == (("context",),)
    small = functools.partial(named, kv_heads=2, context="ulysses", dim=64, length=256)
    draws = np.random.default_rng(0)
    batch = {name: draws.integers(0, 512, (8, 256), np.int32) for name in ("tokens", "targets")}
    sl.testing.assert_equivalent(small, NAMED, batch, [mesh], rules=found.rules, optimizer=ADAM)
