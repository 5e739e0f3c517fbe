"""Experts are found by what a program does with them, and cut over `expert`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from unannotated_lm import LM
from unannotated_lm import loss as lm_loss
from unannotated_moe import VOCAB, MoE, loss

import shardlib as sl
from shardlib.errors import MeshError
from shardlib.find.axes import TracedAxes
from shardlib.find.equivalence import Classes
from shardlib.find.experts import experts_of
from shardlib.registry import DataSpec
from shardlib_models.moe import MoEConfig
from shardlib_models.transformer import FAMILY
from shardlib_models.transformer_config import TransformerConfig

ADAM = optax.adamw(1e-3)
LEAST_BYTES = 1e5
MESHES = "fsdp=4,expert=2", "data=2,expert=4"


def shapes(rows=16, length=32):
    leaf = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    return dict.fromkeys(("tokens", "targets"), leaf)


def draws():
    ids = np.random.default_rng(0)
    return {name: ids.integers(0, VOCAB, x.shape, np.int32) for name, x in shapes().items()}


def switch(params, x):
    """One expert for each token, weighed by its probability (Fedus et al. 2021, section 2.1)."""
    router, up, down = params
    probabilities = jax.nn.softmax(x @ router)
    mask = jax.nn.one_hot(probabilities.argmax(-1), 4)
    places = jax.nn.one_hot(jnp.cumsum(mask, 1).max(-1).astype(int), 8)
    sent = jnp.einsum("bse,bsc,bsd->becd", mask, places, x)
    made = jnp.einsum("bech,ehd->becd", jnp.tanh(jnp.einsum("becd,edh->bech", sent, up)), down)
    return jnp.einsum("bse,bsc,becd->bsd", mask * probabilities, places, made).sum()


def by_index(params, x):
    """Experts choose tokens, which are looked up and added back (Zhou et al. 2022, section 3.2)."""
    router, up, down = params
    weights, chosen = jax.lax.top_k((x @ router).swapaxes(1, 2), 8)
    sent = jax.vmap(lambda row, at: row[at])(x, chosen)
    made = jnp.einsum("bech,ehd->becd", jnp.tanh(jnp.einsum("becd,edh->bech", sent, up)), down)
    made = made * weights[..., None]
    return jax.vmap(lambda row, at, new: row.at[at].add(new))(0 * x, chosen, made).sum()


def every(params, x):
    """Every token goes through all experts."""
    router, up, down = params
    hidden = jnp.tanh(jnp.einsum("bsd,edh->bseh", x, up))
    return jnp.einsum("bse,bseh,ehd->bsd", jax.nn.softmax(x @ router), hidden, down).sum()


def heads(params, x):
    """A matrix for each head, between projections (Beck et al. 2024, "xLSTM", appendix A.4)."""
    router, up, down = params
    parts = (x @ router[:, :, None].repeat(16, 2).reshape(16, -1)).reshape(*x.shape[:2], 4, 16)
    hidden = jnp.tanh(jnp.einsum("bshd,hdn->bshn", parts, up))
    scores = jax.nn.softmax(jnp.einsum("bshn,bthn->bhst", hidden, hidden))
    mixed = jnp.einsum("bhst,bthn->bshn", scores, hidden)
    return jnp.einsum("bshn,hnd->bshd", mixed, down).sum()


@pytest.mark.parametrize(("loss", "count"), [(switch, 4), (by_index, 4), (every, 0), (heads, 0)])
def test_experts_are_known_by_what_is_sent_to_them(loss, count):
    """The router is none of them, although its results have their axis."""
    params = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((16, 4), (4, 16, 32), (4, 32, 16))]
    x = jax.ShapeDtypeStruct((8, 32, 16), jnp.float32)
    with jax.numpy_rank_promotion("allow"):
        closed = jax.make_jaxpr(loss)(params, x)
    traced = TracedAxes(closed, ["param"] * 3 + ["input"])
    classes = Classes(traced, ["router/kernel", "up", "down", "<batch>/x"])
    experts = experts_of(classes)
    assert experts.count == count
    assert experts.dims == ({classes.arguments[n]: 0 for n in (1, 2)} if count else {})


def find(make=MoE, **options):
    options = {"loss": loss, "batch": shapes(), "optimizer": ADAM, "on": "8xh100"} | options
    return sl.find_rules(make, **options)


def large(rngs, **options):
    return MoE(rngs, dim=512, hidden=4096, experts=8, **options)


def cuts(found):
    """Returns the mesh axes of each dim of parameters, by pattern of paths."""
    rules = dict(found.rules.params)
    return {
        path: ["+".join(rules[name][0]) if name else "" for name in names]
        for path, names in found.rules.paths
    }


@pytest.mark.rest("mesh")
@pytest.mark.parametrize(("mesh", "scanned"), [(MESHES[0], True), (MESHES[1], False)])
def test_experts_are_cut_over_expert(mesh, scanned):
    """Expert parallelism: Lepikhin et al. 2020, "GShard", section 3.2. Nothing else takes the
    axis, and rows outside of the experts are cut over it."""
    found = find(functools.partial(large, scanned=scanned), mesh=mesh, batch=shapes(16, 256))
    cut, layers = cuts(found), int(scanned)
    names = {path.rpartition("/")[2] for path, axes in cut.items() if "expert" in "+".join(axes)}
    assert {"up", "down"} <= names <= {"up", "down", "bias"}
    for path, axes in cut.items():
        if path.endswith(("/up", "/down")):
            assert axes[layers] == dict(found.rules.paths)[path][layers] == "expert"
    activations = dict(found.rules.activations)
    assert activations["batch"] == (tuple(axis.partition("=")[0] for axis in mesh.split(",")),)
    assert activations["expert"] == (("expert",),)


@pytest.mark.mesh
def test_small_experts_stay_whole():
    found = find(mesh=MESHES[0])
    assert "expert" not in str(cuts(found).values())
    assert "whole experts, fsdp=4,expert=2" in [price.name for price in found.prices]


@pytest.mark.mesh
@pytest.mark.rest("soak")
@pytest.mark.parametrize(
    ("mesh", "scanned", "microbatches"), [(MESHES[1], True, 2), (MESHES[0], False, 1)]
)
def test_experts_train_as_one_device(mesh, scanned, microbatches):
    make = functools.partial(large, scanned=scanned)
    rules = find(make, mesh=mesh, batch=shapes(16, 256)).rules.at_other_sizes()
    make = functools.partial(MoE, experts=8, scanned=scanned)
    options = {"rules": rules, "optimizer": ADAM, "microbatches": microbatches}
    sl.testing.assert_equivalent(make, loss, draws(), [mesh], **options)


@pytest.mark.mesh
def test_experts_cut_by_hand_train_as_one_device():
    rules = sl.rules.STANDARD.override(paths=HAND)
    make = functools.partial(MoE, experts=8)
    sl.testing.assert_equivalent(make, loss, draws(), [MESHES[0]], rules=rules, steps=1)


def sent(mesh, rules):
    """Returns the bytes that a device sends in a compiled step, by mesh axes."""
    with sl.use(sl.make_mesh(mesh), rules):
        state = sl.abstract_state(large, ADAM)
        # XLA for CPU would gather experts in float32 in either precision.
        report = sl.explain(sl.make_train_step(loss), state, shapes(16, 256))
    by_axes = {}
    for one in report.collectives:
        # XLA for CPU makes no reduce-scatter, so that one is counted where it would be.
        by_axes[one.mesh_axes] = by_axes.get(one.mesh_axes, 0.0) + one.folded_bytes
    return by_axes


HAND = {
    "tokens/embedding": ("vocab", "embed"),
    "head/kernel": ("embed", "vocab"),
    "**/mix/kernel": ("embed", None),
    "**/up": ("expert", "embed", "mlp"),
    "**/down": ("expert", "mlp", "embed"),
}


@pytest.mark.mesh
@pytest.mark.parametrize("mesh", MESHES)
def test_traffic_is_that_of_the_compiled_program_and_no_more_than_by_hand(mesh):
    found = find(large, mesh=mesh, batch=shapes(16, 256), precision="f32")
    told = {}
    for (_, axes), number in found.traffic.items():
        told[axes] = told.get(axes, 0.0) + number
    true = sent(mesh, found.rules)
    axes = {one for one in {*told, *true} if max(told.get(one, 0), true.get(one, 0)) > LEAST_BYTES}
    assert ("expert",) in axes
    for one in axes:
        assert told.get(one, 0.0) == pytest.approx(true.get(one, 0.0), rel=0.15), one
    by_hand = sent(mesh, sl.rules.STANDARD.override(paths=HAND))
    assert sum(true.values()) <= 1.02 * sum(by_hand.values())


@pytest.mark.mesh
@pytest.mark.rest("soak")
@pytest.mark.parametrize("mesh", MESHES)
def test_sorted_dispatch_trains_as_one_device(mesh):
    """`jax.lax.ragged_dot` computes all rows on each device, and the weights are stored cut."""
    found = find(lambda rngs: large(rngs, dispatch="sorted"), mesh=mesh, batch=shapes(16, 256))
    assert cuts(found)["blocks/*/experts/up"][0] == "expert"
    make, rules = functools.partial(MoE, experts=8, dispatch="sorted"), found.rules
    options = {"rules": rules.at_other_sizes(), "optimizer": ADAM}
    sl.testing.assert_equivalent(make, loss, draws(), [mesh], **options)


def mixtral(rngs, dim=4096, hidden=14336, dispatch="dropless"):
    moe = MoEConfig(num_experts=8, dispatch=dispatch)
    sizes = {"embed_dim": dim, "num_heads": 32, "num_kv_heads": 8, "mlp_dim": hidden}
    config = TransformerConfig(num_layers=2, moe=moe, **sizes)
    return FAMILY.make(config, DataSpec(vocab_size=VOCAB, sequence_length=32), rngs)


NAMED = functools.partial(FAMILY.loss, train=True)


@pytest.mark.mesh
@pytest.mark.rest("soak")
@pytest.mark.parametrize(("mesh", "dispatch"), [(MESHES[0], "dropless"), (MESHES[1], "capacity")])
def test_named_experts_keep_their_rule(mesh, dispatch):
    """Sizes of Mixtral 8x7B, whose rows a manual region sends."""
    make = functools.partial(mixtral, dispatch=dispatch)
    found = find(make, mesh=mesh, loss=NAMED, on="8xh200")
    assert dict(found.rules.params)["expert"] == (("expert",),)
    others = [cut for name, (cut, *_) in found.rules.params if name != "expert"]
    assert "expert" not in {axis for cut in others for axis in cut}
    small = functools.partial(make, dim=64, hidden=64)
    options = {"rules": found.rules, "optimizer": ADAM, "steps": 1}
    sl.testing.assert_equivalent(small, NAMED, draws(), [mesh], **options)


@pytest.mark.mesh
def test_a_search_tries_meshes_that_divide_the_experts():
    told = []
    make = functools.partial(MoE, dim=512, hidden=4096, experts=4)
    found = find(make, batch=shapes(16, 256), notify=told.append)
    tried = {line.partition(" microbatches")[0].rpartition(", ")[0] for line in told}
    degrees = {part for mesh in tried for part in mesh.split(",") if part.startswith("expert")}
    assert degrees == {"expert=2", "expert=4"}
    assert not any("expert" in mesh and "tensor" in mesh for mesh in tried)
    assert "expert" in found.mesh_text


@pytest.mark.mesh
def test_a_mesh_with_an_axis_of_experts_needs_experts():
    tokens = dict(shapes())
    with pytest.raises(MeshError, match=r"expert=2.* LM, but it sends.*\n  Leave expert out\."):
        find(LM, mesh="fsdp=4,expert=2", loss=lm_loss, batch=tokens)
    with pytest.raises(MeshError, match=r"expert=8.* MoE, but .* 4 a layer\.\n  Give a divisor"):
        find(mesh="expert=8")
