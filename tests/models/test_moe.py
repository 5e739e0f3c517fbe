"""The mixture of experts as a layer: placement, training on meshes, faults."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.errors import RuleError
from shardlib.explain.analysis.collectives import collectives
from shardlib.functional import functional
from shardlib.functional.precision import precision
from shardlib.losses import Mean
from shardlib.nn.moe import balance_biases
from shardlib.paths import named_leaves
from shardlib_models.moe import MoE, MoEConfig, losses, validate

EXPERTS, K, BATCH, LENGTH, EMBED, MLP = 8, 2, 8, 8, 16, 24
BATCH_AXES = dict.fromkeys(("x", "target"), ("batch", "length", "embed"))
BATCH_AXES |= {"mask": ("batch", "length")}

# Sums in float32 in another order: some units of the last place of the largest entry.
RELATIVE = 5e-6
# Scores that are further apart are ranked alike whatever the rounding, which moves them by 1e-7.
MARGIN = 1e-4

FULL = {"num_shared_experts": 1, "balance": "bias", "balance_loss": 0.1, "router_z_loss": 0.01}
CASES = [
    *(
        (mesh, {**FULL, "dispatch": dispatch, "capacity_factor": 0.75})
        for mesh in ("expert=8", "expert=4,fsdp=2", "data=2,expert=2,tensor=2")
        for dispatch in ("dropless", "capacity")
    ),
    ("expert=2,context=2,tensor=2", {**FULL, "scores": "sigmoid", "balance_over": "sequence"}),
]


def record_gradients():
    """An optimizer that changes nothing and whose state is the gradients of the last step."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, state, params: (jax.tree.map(jnp.zeros_like, grads), grads),
    )


def make(config):
    return lambda rngs: MoE(config, EMBED, MLP, stddev=0.3, rngs=rngs)


def loss_of(config):
    def loss(model, batch, rng):
        y, stats = model(batch["x"], batch["mask"])
        extra, metrics = losses(stats, config, 1)
        weight = jnp.sum(batch["mask"], dtype=jnp.float32)
        error = jnp.where(batch["mask"][..., None], jnp.square(y - batch["target"]), 0.0)
        return Mean(jnp.sum(error) + extra * weight, weight), metrics

    return loss


def train(mesh, config, batch, optimizer=None, *, num_devices=8, microbatches=1, steps=1):
    """Returns metrics and the state after the last step, and what the program sends."""
    mesh = sl.make_mesh(mesh, devices=jax.devices()[:num_devices])
    with sl.use(mesh, sl.rules.STANDARD):
        state = sl.init_state(make(config), optimizer or record_gradients(), seed=0)
    step = sl.make_train_step(loss_of(config), batch_axes=BATCH_AXES, microbatches=microbatches)
    compiled = step.lower(state, batch).compile()
    history = []
    for _ in range(steps):
        state, metrics = compiled(state, batch)
        history.append({name: float(value) for name, value in metrics.items()})
    return history, jax.device_get(state), collectives(compiled.as_text(), mesh)


@pytest.fixture(scope="module")
def batch():
    """A batch without near ties, under the router of the seed that the tests use."""
    with sl.use(sl.make_mesh("data=1", devices=jax.devices()[:1]), sl.rules.STANDARD):
        params = sl.init_state(make(MoEConfig()), record_gradients(), seed=0).params
    kernel = np.asarray(params["router"]["kernel"])
    mask = np.ones((BATCH, LENGTH), bool)
    mask[:, -2:] = False
    for seed in range(1000):
        rng = np.random.default_rng(seed)
        x, target = rng.normal(size=(2, BATCH, LENGTH, EMBED)).astype(np.float32)
        logits = x @ kernel
        scores = [jax.nn.softmax(logits, axis=-1), jax.nn.sigmoid(logits)]
        ranked = [np.sort(np.asarray(s), axis=-1)[..., ::-1][..., : K + 1] for s in scores]
        if min((-np.diff(s)).min() for s in ranked) > MARGIN:
            return {"x": x, "target": target, "mask": mask}
    raise AssertionError("every batch has near ties")


@pytest.fixture(scope="module")
def on_one_device(batch):
    done = {}

    def run(config, **options):
        key = (config, *options.items())
        if key not in done:
            done[key] = train("data=1", config, batch, num_devices=1, **options)[:2]
        return done[key]

    return run


def assert_same(found, expected):
    (history, state), (wanted_history, wanted_state) = found, expected
    for metrics, wanted in zip(history, wanted_history, strict=True):
        assert metrics == pytest.approx(wanted, rel=RELATIVE, abs=1e-9)
    leaves, wanted = named_leaves(state.opt_state), named_leaves(wanted_state.opt_state)
    for path, value in wanted.items():
        limit = RELATIVE * np.abs(value).max()
        np.testing.assert_allclose(leaves[path], value, rtol=0, atol=limit, err_msg=path)


@pytest.mark.mesh
@pytest.mark.parametrize(("mesh", "options"), CASES)
def test_a_step_is_the_same_on_every_mesh(mesh, options, batch, on_one_device):
    config = MoEConfig(**options)
    history, state, sent = train(mesh, config, batch)
    assert_same((history, state), on_one_device(config))
    dropped = history[0]["router_dropped"]
    assert (dropped > 0) == (config.dispatch == "capacity")
    # Tokens travel by all-to-all over experts; none are gathered.
    exchanged = [c for c in sent if c.kind == "all-to-all"]
    assert exchanged
    assert {c.mesh_axes for c in exchanged} == {("expert",)}
    for c in sent:
        if c.kind == "all-gather":
            assert not any(shape.startswith("f32") and _is_of_tokens(shape) for shape in c.shapes)
            assert c.mesh_axes in (("expert",), ("fsdp",), ("context",))


def _is_of_tokens(shape):
    """Whether an array has dims of a batch and of a row, as in `f32[8,8,16]`."""
    dims = [int(d) for d in shape[shape.index("[") + 1 : -1].split(",") if d]
    return len(dims) == 3 and dims[2] == EMBED and dims[:2] == [BATCH, LENGTH]


@pytest.mark.mesh
@pytest.mark.parametrize("dispatch", ["dropless", "capacity"])
def test_microbatches_change_nothing_by_sequence(dispatch, batch, on_one_device):
    options = {**FULL, "dispatch": dispatch, "balance_over": "sequence", "capacity_factor": 0.75}
    config = MoEConfig(**options)
    found = train("expert=4,fsdp=2", config, batch)[:2]
    split = train("expert=4", config, batch, num_devices=4, microbatches=2)[:2]
    # The load of the busiest expert is a metric of a microbatch.
    for history, _ in (found, split):
        history[0].pop("router_max_load")
    assert_same(split, found)


@pytest.mark.mesh
def test_biases_are_balanced_in_a_training(batch):
    config = MoEConfig(balance="bias", scores="sigmoid")
    optimizer = balance_biases(optax.adamw(1e-3, weight_decay=0.1), 0.02)
    # What all tokens have in common, routers have a preference about.
    alike = batch | {"x": batch["x"] + 1}
    history, state, _ = train("expert=4,data=2", config, alike, optimizer, steps=30)
    loads = [metrics["router_max_load"] for metrics in history]
    assert loads[0] > 2
    assert max(loads[-5:]) < 1.5
    bias = state.params["router_bias"]
    np.testing.assert_allclose(np.round(bias / 0.02), bias / 0.02, atol=1e-4)
    assert np.abs(bias).max() > 0.02


@pytest.mark.mesh
@pytest.mark.rest("soak")
@pytest.mark.parametrize("policy", ["bf16", "bf16_params"])
def test_router_biases_keep_small_steps(policy, batch):
    """Next to 1, bfloat16 has no number nearer than 0.004."""
    rate, config = 1e-3, MoEConfig(balance="bias")
    preferred = np.arange(EXPERTS) // 2 == 3
    # All scores are 1/8: the bias alone decides, and it prefers the last two experts by one step.
    bias = np.where(preferred, 1 + rate, 1.0).astype(np.float32)

    def loss(model, batch, rng):
        y, stats = model(batch["x"])
        extra, _ = losses(stats, config, 1)
        return jnp.sum(jnp.square(y)) + extra

    with sl.use(sl.make_mesh("expert=4,data=2"), sl.rules.STANDARD):
        optimizer = balance_biases(optax.sgd(0.0), rate)
        state = sl.init_state(make(config), optimizer, precision=policy)
    kernel = state.params["router"]["kernel"]
    router = {"kernel": jax.device_put(np.zeros(kernel.shape, np.float32), kernel.sharding)}
    biases = jax.device_put(bias, state.params["router_bias"].sharding)
    params = state.params | {"router": router, "router_bias": biases}
    state = dataclasses.replace(state, params=params)
    step = sl.make_train_step(loss, precision=policy, batch_axes={"x": BATCH_AXES["x"]})
    state, _ = step(state, {"x": batch["x"]})
    moved = np.where(preferred, bias - np.float32(rate), bias + np.float32(rate))
    np.testing.assert_array_equal(state.params["router_bias"], moved)


@pytest.mark.mesh
def test_logits_are_computed_in_float32(batch):
    model = make(MoEConfig())(nnx.Rngs(0))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    kept = functional(make(MoEConfig())).float32
    assert kept == {"router/kernel"}
    pure = precision("bf16").cast_params(nnx.to_pure_dict(params), kept)
    nnx.replace_by_pure_dict(params, pure)
    x = jnp.asarray(batch["x"], jnp.bfloat16)
    _, stats = nnx.merge(graphdef, params, rest)(x)
    kernel = np.asarray(model.router.kernel[...], np.float64)
    logits = np.asarray(x, np.float64) @ kernel
    expected = np.square(np.log(np.exp(logits).sum(-1))).sum()
    # Sums of float32; a kernel in bfloat16 is off by some 1e-4.
    assert float(stats.z) == pytest.approx(expected, rel=2e-6)


def test_parameters_lie_by_their_logical_axes():
    config = MoEConfig(**FULL)
    with sl.use(sl.make_mesh("fsdp=2,expert=2,tensor=2"), sl.rules.STANDARD):
        params = sl.init_state(make(config), optax.sgd(1.0), seed=0).params
    specs = {path: tuple(x.sharding.spec) for path, x in named_leaves(params).items()}
    assert specs == {
        "experts/down": ("expert", "tensor", "fsdp"),
        "experts/gate": ("expert", "fsdp", "tensor"),
        "experts/up": ("expert", "fsdp", "tensor"),
        "router/kernel": ("fsdp", "expert"),
        "router_bias": ("expert",),
        "shared/down/kernel": ("tensor", "fsdp"),
        "shared/gate/kernel": ("fsdp", "tensor"),
        "shared/up/kernel": ("fsdp", "tensor"),
    }
    assert params["experts"]["down"].shape == (EXPERTS, MLP, EMBED)


def test_experts_that_the_mesh_does_not_divide_are_refused_before_anything_is_made():
    config = MoEConfig(num_experts=6)
    mesh = sl.make_mesh("expert=4,data=2")
    with sl.use(mesh, sl.rules.STANDARD), pytest.raises(RuleError) as caught:
        sl.init_state(make(config), optax.sgd(1.0), seed=0)
    message = str(caught.value)
    for path in ("experts/gate", "experts/up", "experts/down", "router/kernel"):
        assert path in message
    assert "expert=4 does not divide 6" in message


def test_faults_of_a_config():
    config = MoEConfig(
        num_experts=2,
        experts_per_token=3,
        mlp_dim=0,
        capacity_factor=0.0,
        router_z_loss=-1.0,
        balance="none",
        balance_loss=0.1,
        dispatch="capacity",
        exchange_chunks=2,
    )
    names = ["mlp_dim", "router_z_loss", "capacity_factor", "experts_per_token", "balance_loss"]
    found = validate(config)
    assert len(found) == len(names) + 1
    for name, fault in zip([*names, "exchange_chunks"], found, strict=True):
        assert fault.startswith(f"moe.{name}")
    assert validate(MoEConfig()) == []
