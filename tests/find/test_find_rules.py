"""The rules that an engineer would write are found for models that name no axes."""

import json

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from unannotated_lm import LM, batch, loss, shapes

import shardlib as sl
from shardlib.errors import (
    ConfigError,
    DataError,
    DoesNotFitError,
    MeshError,
    ModelError,
    RuleError,
)
from shardlib.humanize import duration
from shardlib.rules import from_yaml

ADAM = optax.adamw(1e-3)


def find(make=LM, rows=16, length=512, **options):
    options = {"loss": loss, "batch": shapes(rows, length), "optimizer": ADAM} | options
    return sl.find_rules(make, **{"on": "8xh100", "mesh": "fsdp=4,tensor=2"} | options)


def large(rngs, layers=2):
    return LM(rngs, layers=layers, dim=4096, heads=32)


def cut_dims(found, pattern):
    """The mesh axes of each dim of the parameters of a pattern."""
    rules = dict(found.rules.params)
    axes = dict(found.rules.paths)[pattern]
    return tuple("+".join(rules[name][0]) if name else "" for name in axes)


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("scanned", [True, False], ids=["scanned", "unrolled"])
def test_megatron_is_found(scanned):
    """Projections to heads and MLP are cut along their outputs, those back along their inputs."""
    found = find(lambda rngs: LM(rngs, dim=4096, heads=32, scanned=scanned))
    prefix, layers = ("blocks", ("",)) if scanned else ("blocks/*", ())
    for name in ("query", "key", "value", "up"):
        assert cut_dims(found, f"{prefix}/{name}/kernel") == (*layers, "fsdp", "tensor")
    for name in ("out", "down"):
        assert cut_dims(found, f"{prefix}/{name}/kernel") == (*layers, "tensor", "fsdp")
    tables = found.rules.params + found.rules.activations
    assert sum(bool(alternatives[0]) for _, alternatives in tables) <= 12
    assert found.solution.gap <= 1e-3


@pytest.mark.mesh
def test_the_residual_stream_is_cut_over_tensor():
    """Norms and residuals are not repeated on every device of `tensor`: Korthikanti et al. 2022
    cut the length, which is found here, or the width, which sends the same."""
    found = find(large)
    names = found.names[
        next(
            number
            for number, tensor in enumerate(found.classes.tensors)
            if tensor.kind == "activation" and tensor.shape == (16, 512, 4096)
        )
    ]
    rules = dict(found.rules.activations)
    assert {"tensor"} < {axis for name in names for axis in rules[name][0]} == {"fsdp", "tensor"}


def test_a_small_model_is_replicated():
    found = find(mesh="data=8", rows=64)
    assert not any(alternatives[0] for _, alternatives in found.rules.params)
    assert dict(found.rules.activations)["batch"] == (("data",),)


@pytest.mark.mesh
def test_depth_does_not_change_the_problem():
    one, few, many = (find(lambda rngs, n=n: large(rngs, n)) for n in (1, 2, 6))
    for other in (one, many):
        assert few.solution.num_variables == other.solution.num_variables
        assert few.solution.layouts == other.solution.layouts
        assert dict(few.rules.params) == dict(other.rules.params)
        assert few.rules.paths == other.rules.paths
    # Among axes that several classes cut otherwise, the one with most bytes keeps the name.
    assert dict(few.rules.activations) == dict(many.rules.activations)


@pytest.mark.mesh
def test_the_mesh_is_found():
    """A model whose state fills a device is cut; the best of all meshes is at least as good as
    each."""
    told = []
    found = find(large, mesh=None, notify=told.append)
    seconds = duration(found.prices[0].seconds)
    assert f"{found.mesh_text}, 1 microbatches: {seconds} a step" in told
    for mesh in ("fsdp=8", "fsdp=4,tensor=2", "data=2,fsdp=4"):
        assert found.prices[0].rank <= find(large, mesh=mesh).prices[0].rank


@pytest.mark.mesh
def test_microbatches_are_found_where_memory_needs_them():
    """A part of the memory of a step leaves room for its state, but for part of its activations."""
    options = {"rows": 64, "mesh": "fsdp=8"}
    whole = find(large, **options)
    assert whole.microbatches == 1
    memory = 0.85 * whole.prices[0].memory_bytes
    found = find(large, memory_bytes=memory, **options)
    assert found.microbatches > 1
    assert found.prices[0].memory_bytes <= memory
    assert f", {found.microbatches} microbatches on 8xh100" in str(found)
    with pytest.raises(DoesNotFitError):
        find(large, memory_bytes=memory / 100, **options)


def test_what_does_not_fit_says_how_much_is_missing():
    with pytest.raises(DoesNotFitError, match=r"needs at least \d+\.\d GiB and has 15\.8 GiB"):
        find(lambda rngs: LM(rngs, dim=2**15, heads=64), on="v5e-8")


def test_other_mesh_axes_are_refused():
    with pytest.raises(MeshError, match=r"context=2.*\n.*Leave context out"):
        find(mesh="fsdp=4,context=2")


BATCH = {"x": jax.ShapeDtypeStruct((16, 512), jnp.float32)}
WRONG = {
    "scalar": ({"batch": BATCH | {"s": jax.ShapeDtypeStruct((), jnp.float32)}}, DataError, "s has"),
    "no rows": ({"batch": {"x": jax.ShapeDtypeStruct((0, 4), jnp.float32)}}, DataError, "x has no"),
    "nothing": ({"batch": {}}, DataError, "the batch has no rows"),
    "microbatches": ({"microbatches": 3}, MeshError, "the 16 rows of the batch in 3 microbatches"),
    "seconds": ({"seconds": -1}, ConfigError, "seconds=-1 is not a positive"),
    "text": ({"microbatches": "auto"}, ConfigError, "microbatches='auto' is not a positive int"),
    "memory": ({"memory_bytes": float("nan")}, ConfigError, "memory_bytes=nan is not"),
    "preset": ({"rules": "standard"}, RuleError, "'standard', not an AxisRules"),
    "forbidden": ({"forbidden": [3]}, ConfigError, r"forbidden=\[found\]"),
    "lists": ({"batch": {"x": [[0.0] * 512] * 16}}, DataError, "and 8188 more has no rows"),
    "vector": ({"loss": lambda model, batch: model(batch["tokens"])}, ModelError, "of shape"),
    "nothing returned": ({"loss": lambda model, batch: None}, ModelError, "NoneType"),
    "inputs": ({"loss": lambda model, batch, rng, teacher: 0.0}, ModelError, "inputs besides"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case):
    options, error, text = WRONG[case]
    with pytest.raises(error, match=text):
        find(**options)


def test_all_leaves_of_a_batch_are_counted():
    """`z` is in no product; `fsdp=4` divides the rows of the others."""
    rows = {name: jax.ShapeDtypeStruct((n, 512), jnp.int32) for name, n in (("z", 18),)}
    text = "fsdp=4,tensor=2 does not divide.*tokens: 16.*z: 18.*\n.*multiple of 4 rows"
    with pytest.raises(MeshError, match=text):
        find(batch=shapes(16, 512) | rows)
    found = find(batch=shapes(16, 512) | {"z": jax.ShapeDtypeStruct((32,), jnp.int32)})
    assert found.sizes["fsdp"] == 4


class Named(linen.Module):
    """Its paths look alike, one scalar parameter has no axis, and its width is constrained."""

    constrained: bool = False

    @linen.compact
    def __call__(self, x):
        normal = linen.initializers.normal(0.02)
        for name in ("w1", "w2"):
            x = jnp.tanh(x @ self.param(name, normal, (512, 512)))
        x = x @ self.param("wide", normal, (512, 2048)) * self.param("w", normal, ())
        if self.constrained:
            x = sl.constrain(x, "batch", "features")
        return (
            x @ self.param("wout", normal, (2048, 512)) + self.param("wbias", normal, (512,))[None]
        )


def contrastive(model, batch):
    """Every row meets every other one."""
    z = model(batch["x"])
    scores = z @ batch["x"].T
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(scores)))


@pytest.mark.mesh
def test_a_pattern_matches_no_other_parameters_and_rows_may_meet():
    found = find(Named(), loss=contrastive, batch=BATCH, inputs=(BATCH["x"],), precision="f32")
    paths = dict(found.rules.paths)
    assert "w*" not in paths
    assert len(paths["wbias"]) == 1
    assert paths["w"] == ()
    x = {"x": np.random.default_rng(0).normal(size=(16, 512)).astype("f")}
    compared = sl.testing.assert_equivalent(
        Named(), contrastive, x, ["fsdp=4,tensor=2"], rules=found.rules, inputs=(x["x"],)
    )
    assert compared.comparisons


@pytest.mark.mesh
def test_rows_of_two_inputs_may_meet():
    """Images of one leaf are compared with texts of another, of which there are fewer."""

    def compared(model, batch):
        return -jnp.mean(jax.nn.log_softmax(model(batch["x"]) @ batch["y"].T)[:, 0])

    inputs = BATCH | {"y": jax.ShapeDtypeStruct((8, 512), jnp.float32)}
    options = {"loss": compared, "inputs": (BATCH["x"],)}
    found = find(Named(), batch=inputs, precision="f32", **options)
    draws = np.random.default_rng(0)
    host = {name: draws.normal(size=leaf.shape).astype("f") for name, leaf in inputs.items()}
    options = {"rules": found.rules, "inputs": (host["x"],), "steps": 1}
    assert sl.testing.assert_equivalent(Named(), compared, host, ["fsdp=4,tensor=2"], **options)


@pytest.mark.mesh
def test_a_model_that_names_activations_alone_gets_rules_for_paths_and_names():
    """Its tables have the names of its constraint; parameters go by path."""
    model = Named(constrained=True)
    found = find(model, loss=contrastive, batch=BATCH, inputs=(BATCH["x"],), precision="f32")
    assert {"batch", "features"} <= set(dict(found.rules.activations))
    assert dict(found.rules.activations)["batch"] == (("fsdp",),)
    assert {"w1", "wide", "wout"} <= set(dict(found.rules.paths))
    x = {"x": np.random.default_rng(0).normal(size=(16, 512)).astype("f")}
    options = {"rules": found.rules, "inputs": (x["x"],)}
    assert sl.testing.assert_equivalent(model, contrastive, x, ["fsdp=4,tensor=2"], **options)


def test_given_rules_of_one_structure_must_agree():
    given = sl.rules.STANDARD.override(paths={"blocks/0/up/kernel": (None, None)})
    with pytest.raises(RuleError, match=r"blocks/0/up/kernel, blocks/1/up/kernel have one"):
        find(large, rules=given)


def test_given_rules_stay():
    given = sl.rules.STANDARD.override(paths={"**/up/kernel": (None, None)})
    found = find(large, rules=given)
    assert cut_dims(found, "blocks/*/up/kernel") == ("", "")
    assert cut_dims(found, "blocks/*/query/kernel") == ("fsdp", "tensor")


@pytest.mark.mesh
def test_the_report_names_rules_costs_and_memory():
    found = find(large)
    for text in (str(found), found.html()):
        for part in ("rules found for fsdp=4,tensor=2 on 8xh100", "of products", "not cut:"):
            assert part in text
    facts = json.loads(json.dumps(found.to_dict()))
    assert from_yaml(json.dumps(facts["rules"])) == found.rules
    assert facts["prices"][0]["seconds"] == found.prices[0].seconds


class Net(linen.Module):
    """Wide convolutions on small images, whose channels are worth cutting."""

    @linen.compact
    def __call__(self, x):
        x = jax.nn.relu(linen.Conv(2048, (3, 3))(x))
        x = jax.nn.relu(linen.Conv(2048, (3, 3))(x))
        return linen.Dense(16)(x.mean((1, 2)))


@pytest.mark.mesh
def test_channels_of_convolutions_are_cut():
    def squared(model, batch):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    image = jax.ShapeDtypeStruct((8, 8, 8, 512), jnp.float32)
    label = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    found = find(Net(), loss=squared, batch={"x": image, "y": label}, inputs=(image,))
    kernels = [cut_dims(found, f"Conv_{n}/kernel") for n in range(2)]
    assert all("tensor" in "".join(cut) for cut in kernels)


@pytest.mark.mesh
@pytest.mark.rest("soak")
@pytest.mark.parametrize(
    ("mesh", "scanned"), [("fsdp=4,tensor=2", True), ("data=2,fsdp=2,tensor=2", False)]
)
def test_found_rules_train_as_one_device(mesh, scanned):
    def make(rngs):
        return LM(rngs, scanned=scanned)

    found = find(make, mesh=mesh, length=32)
    meshes = [mesh]
    sl.testing.assert_equivalent(make, loss, batch(16), meshes, rules=found.rules, optimizer=ADAM)


HAND = {
    "tokens/embedding": ("vocab", "embed"),
    "head/kernel": ("embed", "vocab"),
    "blocks/*/out/kernel": ("heads", "embed"),
    "blocks/*/up/kernel": ("embed", "mlp"),
    "blocks/*/down/kernel": ("mlp", "embed"),
    **{f"blocks/*/{name}/kernel": ("embed", "heads") for name in ("query", "key", "value")},
}


@pytest.mark.mesh
@pytest.mark.parametrize(
    "mesh",
    ["fsdp=4,tensor=2", pytest.param("data=2,fsdp=2,tensor=2", marks=pytest.mark.soak)],
)
def test_they_send_no_more_than_rules_written_by_hand(mesh):
    def sent(rules):
        with sl.use(sl.make_mesh(mesh), rules):
            state = sl.abstract_state(large, ADAM)
            step = sl.make_train_step(loss, precision="bf16")
            report = sl.explain(step, state, shapes(16, 512))
        return sum(c.folded_bytes for c in report.collectives)

    by_hand = sl.rules.STANDARD.override(paths=HAND)
    # Sums of the loss and of norms are all that may differ.
    assert sent(find(large, mesh=mesh).rules) <= 1.02 * sent(by_hand)


class Own(nnx.Module):
    """It has names that no preset knows, and reads its sequence in a loop."""

    def __init__(self, rngs):
        normal = jax.random.normal(rngs.params(), (64, 512))
        self.weight = nnx.Param(normal, out_sharding=("ins", "outs"))

    def __call__(self, x):
        def trip(carry, row):
            return carry, jnp.tanh(row @ self.weight[...])

        return jax.lax.scan(trip, 0.0, x.swapaxes(0, 1))[1]


def test_names_of_ones_own_and_the_axis_of_a_loop():
    x = {"x": jax.ShapeDtypeStruct((16, 32, 64), jnp.float32)}
    found = find(Own, loss=lambda model, batch: jnp.mean(model(batch["x"]) ** 2), batch=x)
    assert dict(found.rules.paths)["weight"] == ("ins", "outs")
    (lengths,) = (n for n, axis in enumerate(found.classes.axes) if axis.size == 32)
    stacked = [t for t in found.classes.tensors if t.shape == (32, 16, 512)]
    assert stacked
    assert all(t.axes[0] == lengths for t in stacked)


@pytest.mark.mesh
def test_heads_of_flax_attention_have_their_name():
    def make(rngs):
        return nnx.MultiHeadAttention(32, 4096, decode=False, use_bias=False, rngs=rngs)

    x = {"x": jax.ShapeDtypeStruct((16, 512, 4096), jnp.float32)}
    found = find(make, loss=lambda m, b: jnp.mean(m(b["x"]) ** 2), batch=x, precision="f32")
    paths = dict(found.rules.paths)
    assert {paths[f"{name}/kernel"][1] for name in ("query", "key", "value")} == {"heads"}
    assert paths["out/kernel"][0] == "heads"


class Wide(nnx.Module):
    """Its carry is in float32, whatever its parameters are in."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(512, 512, rngs=rngs)

    def __call__(self, x):
        carry = jnp.zeros(x.shape, jnp.float32)
        return jax.lax.scan(lambda carry, _: (self.layer(x), None), carry, length=2)[0]


def test_a_model_that_computes_in_float32_alone_is_told_so():
    with pytest.raises(ModelError, match=r"Wide takes .*not in bfloat16: scan(.|\n)*precision="):
        find(Wide, loss=lambda model, batch: jnp.mean(model(batch["x"]) ** 2), batch=BATCH)


class Images(nnx.Module):
    """Few channels on large images, of which none is worth a cut."""

    def __init__(self, rngs):
        self.first = nnx.Conv(3, 32, (3, 3), rngs=rngs)
        self.second = nnx.Conv(32, 32, (3, 3), rngs=rngs)

    def __call__(self, x):
        return self.second(jax.nn.relu(self.first(x)))


@pytest.mark.mesh
def test_rows_are_cut_over_tensor_where_nothing_else_is_worth_it():
    def squared(model, batch):
        return jnp.mean(model(batch["x"]) ** 2)

    def batch(size, make):
        return {"x": make((16, size, size, 3))}

    shapes = batch(128, lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32))
    found = find(Images, loss=squared, batch=shapes, on="v5e-8")
    assert found.prices[0].name == "rows over tensor, fsdp=4,tensor=2"
    assert dict(found.rules.activations)["batch"] == (("fsdp", "tensor"),)
    host = batch(8, lambda shape: np.random.default_rng(0).normal(size=shape).astype("f"))
    sl.testing.assert_equivalent(
        Images, squared, host, ["fsdp=4,tensor=2"], rules=found.rules, steps=1
    )
