"""Optimizer state is cut further than its parameters where that is worth it."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from unannotated_lm import LM, batch, loss, shapes

import shardlib as sl
from shardlib.errors import DoesNotFitError
from shardlib.find.opt_state import updates_apart
from shardlib.registry import DataSpec
from shardlib.rules import from_yaml, to_yaml
from shardlib_models.transformer import FAMILY
from shardlib_models.transformer_config import TransformerConfig

ADAM = optax.adamw(1e-3)
NAMED = functools.partial(FAMILY.loss, train=True)
ELEMENTS = 2 * 12 * 2048**2 + 2 * 512 * 2048
"""Of the matrices of `large`."""


def large(rngs):
    return LM(rngs, dim=2048, heads=16)


def named(rngs, dim=2048):
    sizes = {"embed_dim": dim, "num_heads": 16, "num_kv_heads": 16, "mlp_dim": 4 * dim}
    config = TransformerConfig(num_layers=2, **sizes)
    return FAMILY.make(config, DataSpec(vocab_size=512, sequence_length=512), rngs)


def memory(element_bytes):
    """Bytes of a device, of which a GPU's runtime takes 2e9. An element of a parameter has 16 bytes
    of state, or 5.5 if gradients and moments are in eighths, and a copy in bfloat16."""
    return 2e9 + element_bytes * ELEMENTS


def find(make=large, rows=64, length=512, **options):
    options = {"loss": loss, "optimizer": ADAM, "on": "8xh100", "mesh": "data=8"} | options
    return sl.find_rules(make, batch=shapes(rows, length), **options)


def cut(rules):
    """The mesh axes of each name of parameters that is cut."""
    return {name: cuts[0] for name, cuts in rules.params if cuts[0]}


@pytest.mark.mesh
def test_the_state_is_cut_where_parameters_fit_and_it_does_not():
    """ZeRO stage 1: Rajbhandari et al. 2020, section 5.1."""
    found = find(rows=8, length=32, memory_bytes=memory(13))
    assert not cut(found.rules)
    assert dict(found.rules.activations)["batch"] == (("data",),)
    assert found.rules.gradients is None
    assert found.rules.opt_state is not None
    assert cut(found.rules.opt_state) == {"embed": ("data",)}
    assert found.prices[0].name == "zero1, data=8"
    assert found.prices[0].memory_bytes <= memory(13)
    assert "optimizer state is in more parts" in str(found)
    assert from_yaml(to_yaml(found.rules)) == found.rules
    with pytest.raises(DoesNotFitError):
        find(rows=8, length=32, memory_bytes=memory(4))


@pytest.mark.mesh
@pytest.mark.parametrize(("make", "of"), [(large, loss), (named, NAMED)], ids=["plain", "named"])
def test_parameters_are_not_gathered_in_many_microbatches(make, of):
    """Stage 2: parameters are gathered once a step, and gradients go straight to their parts."""
    found = find(make, 128, loss=of, mesh="fsdp=8", microbatches=16)
    assert found.rules.gradients == found.rules.opt_state is not None
    assert not cut(found.rules)
    assert set(cut(found.rules.opt_state).values()) == {("fsdp",)}
    assert "gradients and optimizer state are in more parts" in str(found)
    assert found.prices[0].seconds < found.prices[-1].seconds
    assert from_yaml(to_yaml(found.rules)) == found.rules


@pytest.mark.mesh
def test_the_state_of_matrices_that_are_updated_whole_stays_whole():
    """Muon multiplies whole momentum matrices; SGD has the same bytes of momentum."""
    options = {"rows": 8, "length": 32, "memory_bytes": memory(12)}
    momentum = find(optimizer=optax.sgd(1e-3, momentum=0.9), **options)
    assert momentum.rules.opt_state is not None
    with pytest.raises(DoesNotFitError):
        find(optimizer=optax.contrib.muon(1e-3), **options)


CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAM)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (CLIPPED, True),
        (optax.lamb(1e-3), True),
        (optax.adafactor(1e-3), True),
        (optax.MultiSteps(ADAM, 4), True),
        (optax.apply_if_finite(CLIPPED, 4), True),
        (optax.contrib.muon(1e-3), False),
        (optax.flatten(ADAM), False),
        (optax.adaptive_grad_clip(0.1), False),
    ],
    ids=["clip", "lamb", "adafactor", "multi steps", "if finite", "muon", "flatten", "unit norms"],
)
def test_parts_are_updated_apart_unless_elements_meet(optimizer, expected):
    params = {"w": jax.ShapeDtypeStruct((4, 256, 256), jnp.float32)}
    params["v"], params["b"] = (jax.ShapeDtypeStruct(n, jnp.float32) for n in ((512, 512), (8,)))

    def update(grads, state, params):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return optimizer.update(grads, state, params)

    state = jax.eval_shape(optimizer.init, params)
    program = jax.make_jaxpr(update)(params, state, params).jaxpr
    assert updates_apart(program) == expected


def test_small_parameters_keep_their_state_whole():
    found = find(memory_bytes=memory(13), rows=8, length=32)
    paths = dict(found.rules.paths)
    state = dict(found.rules.opt_state.params)
    assert not any(state[name][0] for name in paths["norm/scale"])
    assert any(state[name][0] for name in paths["head/kernel"])


@pytest.mark.mesh
@pytest.mark.rest("soak")
@pytest.mark.parametrize(
    ("mesh", "microbatches", "options"),
    [
        ("data=2,fsdp=4", 4, {"rows": 128}),
        ("data=8", 1, {"rows": 8, "length": 32, "memory_bytes": memory(13)}),
    ],
    ids=["stage 2", "stage 1"],
)
def test_they_train_as_one_device(mesh, microbatches, options):
    found = find(mesh=mesh, microbatches=microbatches, **options)
    assert (found.rules.opt_state is None, found.rules.gradients is None) == (
        False,
        microbatches == 1,
    )
    rules = found.rules.at_other_sizes()
    options = {"rules": rules, "optimizer": ADAM, "microbatches": microbatches}
    sl.testing.assert_equivalent(LM, loss, batch(32), [mesh], **options)


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("optimizer", "element_bytes"),
    [(ADAM, 14), (optax.adafactor(1e-3), 9)],
    ids=["adamw", "adafactor"],
)
def test_traffic_is_that_of_the_compiled_program(optimizer, element_bytes):
    options = {"optimizer": optimizer, "memory_bytes": memory(element_bytes)}
    found = find(rows=8, precision="f32", **options)
    assert found.rules.opt_state is not None
    with sl.use(sl.make_mesh("data=8"), found.rules):
        state = sl.abstract_state(large, optimizer)
        report = sl.explain(sl.make_train_step(loss), state, shapes(8, 512))
    compiled = sum(one.folded_bytes for one in report.collectives)
    assert sum(found.traffic.values()) == pytest.approx(compiled, rel=0.15)
