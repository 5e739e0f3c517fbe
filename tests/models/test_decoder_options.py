"""Decoders of several kinds: generation equals recomputation, and meshes equal one device."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.config import load
from shardlib.cost.transformer.flops import step_flops
from shardlib.cost.workload import Job
from shardlib.errors import ConfigError, ModelError
from shardlib.nn.attention import LongScaling, YarnScaling
from shardlib.nn.remat import part_of
from shardlib.paths import named_leaves
from shardlib.plan.api import of_dims
from shardlib.registry import DataSpec
from shardlib.run import RunConfig
from shardlib_models.moe import MoEConfig
from shardlib_models.transformer import FAMILY, loss, make
from shardlib_models.transformer_config import LatentConfig, TransformerConfig
from shardlib_models.transformer_decode import generate

pytestmark = pytest.mark.mesh

VOCAB, ROWS, LENGTH = 96, 8, 16
SIZES = {"vocab_size": VOCAB, "embed_dim": 32, "num_heads": 4, "mlp_dim": 48, "max_positions": 64}
CONFIGS = {
    "gemma3": TransformerConfig(
        **SIZES,
        num_layers=4,
        num_kv_heads=2,
        head_dim=16,
        window=5,
        global_every=2,
        local_rope_theta=1e4,
        rope_theta=1e6,
        qk_norm=True,
        block="sandwich",
        norm_offset=1.0,
        attention_softcap=3.0,
        logit_softcap=2.0,
    ),
    "deepseek": TransformerConfig(
        **SIZES,
        num_layers=5,
        latent=LatentConfig(query_rank=16, kv_rank=16, plain_dims=8, rotary_dims=8, value_dim=16),
        moe=MoEConfig(
            num_experts=8,
            experts_per_token=2,
            mlp_dim=16,
            num_shared_experts=1,
            dense_layers=1,
            groups=4,
            groups_per_token=2,
            group_best=2,
            scores="sigmoid",
            balance="bias",
        ),
        remat="0-1:dots,2:full,3:dots,4:full",
    ),
    "gpt_oss": TransformerConfig(
        **SIZES,
        num_layers=4,
        num_kv_heads=2,
        head_dim=16,
        window=5,
        global_every=2,
        rope_scaling=YarnScaling(factor=4.0, original_positions=64, truncate=False),
        activation="clamped_swiglu",
        sinks=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        moe=MoEConfig(num_experts=4, experts_per_token=2, router_bias=True, balance_loss=0.0),
    ),
    "stablelm": TransformerConfig(
        **SIZES,
        num_layers=2,
        num_kv_heads=2,
        norm="layer",
        qk_norm="heads",
        block="parallel_one_norm",
        embed_scale=3.0,
        residual_scale=0.5,
        logit_divisor=2.0,
    ),
    "phi3": TransformerConfig(
        **SIZES,
        num_layers=2,
        rotary_dims=4,
        rope_scaling=LongScaling(
            short_factors=(1.0, 1.5), long_factors=(1.0, 4.0), factor=4.0, original_positions=12
        ),
    ),
}
MESHES = ["fsdp=8", "fsdp=4,tensor=2", "data=2,context=2,tensor=2", "expert=2,data=2,tensor=2"]


@pytest.fixture(autouse=True)
def highest():
    with jax.default_matmul_precision("highest"):
        yield


@functools.cache
def parts_of(config):
    """The model in one program: operation by operation there would be hundreds."""
    return jax.jit(lambda: nnx.split(make(config, DataSpec(), nnx.Rngs(0))))()


def model_of(config):
    graphdef, state = parts_of(config)
    return nnx.merge(graphdef, jax.tree.map(lambda x: x, state))


def tokens(length):
    return np.random.default_rng(0).integers(0, VOCAB, (ROWS, length), dtype=np.int32)


@pytest.mark.parametrize("name", CONFIGS)
def test_generation_is_that_of_whole_rows(name):
    model, prompt, added = model_of(CONFIGS[name]), jnp.asarray(tokens(10)), 6
    key = jax.random.key(0)
    out = jax.jit(lambda x: generate(model, x, length=added, temperature=0.0, rng=key))(prompt)
    # Row by row of one length, so that a scaling by length reads the same one.
    logits = jax.jit(model)(out)
    expected = jnp.argmax(logits[:, prompt.shape[1] - 1 : -1], axis=-1)
    np.testing.assert_array_equal(out[:, prompt.shape[1] :], expected)


def losses(name, mesh, **options):
    """The losses of three steps."""
    rows = tokens(LENGTH + 1)
    batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
    devices = jax.devices()[:1] if mesh == "data=1" else None
    with sl.use(sl.make_mesh(mesh, devices=devices), sl.rules.STANDARD):
        made = functools.partial(make, CONFIGS[name], DataSpec())
        state = sl.init_state(lambda rngs: made(rngs), optax.adam(1e-2))

        def of_batch(model, batch, rng):
            return loss(model, batch, rng, train=True)

        step = sl.make_train_step(of_batch, **options)
        found = []
        for _ in range(3):
            state, metrics = step(state, batch)
            found.append(float(metrics["loss"]))
    return found


# Every config on each mesh: first each config once, on one mesh after the other.
ROUNDS = [
    (name, MESHES[(number + turn) % len(MESHES)])
    for turn in range(len(MESHES))
    for number, name in enumerate(CONFIGS)
]


@pytest.mark.rest("soak", keep=len(CONFIGS))
@pytest.mark.parametrize(("name", "mesh"), ROUNDS)
def test_steps_are_the_same_on_every_mesh(name, mesh):
    options = {"microbatches": 2} if name == "deepseek" else {}
    expected = one_device(name, **options)
    assert expected[-1] < expected[0]
    # Sums over devices round float32 in another order; Adam divides by small numbers.
    np.testing.assert_allclose(losses(name, mesh, **options), expected, rtol=2e-5)


@functools.cache
def one_device(name, **options):
    return losses(name, "data=1", **options)


def gradients(mesh, **options):
    """Gradients of gpt-oss by path, at weights without zeros, and after init_state placed them."""
    config = dataclasses.replace(CONFIGS["gpt_oss"], **options)
    model = model_of(config)
    rng = np.random.default_rng(0)
    moved = [x + 0.1 * rng.normal(size=x.shape).astype(np.float32) for x in leaves_of(model)]
    nnx.update(model, jax.tree.unflatten(jax.tree.structure(nnx.state(model)), moved))
    rows = tokens(LENGTH + 1)
    batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
    size = math.prod(int(axis.split("=")[1]) for axis in mesh.split(","))
    with sl.use(sl.make_mesh(mesh, devices=jax.devices()[:size]), sl.rules.STANDARD):
        params = sl.init_state(model, optax.sgd(0.1)).params
        graphdef = nnx.graphdef(model)

        def mean(params):
            found = nnx.merge(graphdef, nnx.State(params))
            mean, _ = loss(found, batch, jax.random.key(0), train=True)
            return mean.total / mean.weight

        return named_leaves(jax.jit(jax.grad(mean))(params))


@functools.cache
def gradients_of_one_device(**options):
    return gradients("data=1", **options)


def leaves_of(model):
    return jax.tree.leaves(nnx.state(model))


@pytest.mark.rest("soak", keep=3)
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("fsdp=4,tensor=2", {}),
        ("context=2", {}),
        ("context=2", {"context": "ulysses"}),
        ("fsdp=4,tensor=2", {"attention": "blockwise"}),
        ("context=2", {"context": "gather"}),
        ("tensor=4,expert=2", {"norm": "layer", "qk_norm": "heads"}),
    ],
)
def test_gradients_with_sinks_are_those_of_one_device(mesh, options):
    # One device has no `context` to attend over.
    alone = {key: value for key, value in options.items() if key != "context"}
    expected, found = gradients_of_one_device(**alone), gradients(mesh, **options)
    assert expected.keys() == found.keys()
    assert {"layers/attention/sinks", "layers/mlp/experts/down_bias"} <= found.keys()
    for path, grad in expected.items():
        assert np.abs(grad).max() > 0, path
        # Sums of at most 8 * 16 * 4 terms, in another order.
        atol = 512 * 2**-24 * max(np.abs(grad).max(), 1e-2)
        np.testing.assert_allclose(found[path], grad, rtol=0, atol=atol, err_msg=path)


def test_the_layers_with_experts_are_divided_over_stages():
    plain = CONFIGS["deepseek"].remat
    assert part_of(plain, 5, 0, 1) == "0-0:dots"
    assert part_of(plain, 5, 1, 5) == "0-0:dots,1-1:full,2-2:dots,3-3:full"
    # The balance of experts in each microbatch differs from that of the whole batch.
    actual = losses("deepseek", "stage=2,fsdp=4", microbatches=2)
    np.testing.assert_allclose(actual, one_device("deepseek", microbatches=2), rtol=2e-5)


@pytest.mark.rest("soak")
@pytest.mark.parametrize("mesh", ["stage=4,tensor=2", "stage=2,fsdp=2,context=2"])
def test_layers_with_different_windows_are_divided_over_stages(mesh):
    """Stages of one layer each have different windows at the same time."""
    actual = losses("gemma3", mesh, microbatches=4)
    np.testing.assert_allclose(actual, one_device("gemma3"), rtol=2e-5)


def test_configs_of_earlier_runs_are_read():
    words = ["data.path=builtin:python", "model.embed_scale=false"]
    words += ["optimizer.no_decay=['**/bias','**/scale']"]
    config = load(RunConfig, None, words)
    assert config.model == TransformerConfig()
    assert TransformerConfig(embed_scale=True) == TransformerConfig(embed_scale="sqrt")
    with pytest.raises(ConfigError, match="no_decay does nothing with weight_decay=0"):
        load(RunConfig, None, [*words[:2], "optimizer.no_decay=['**/bias']"])


def weights_of(config):
    return jax.eval_shape(lambda: nnx.state(make(config, DataSpec(), nnx.Rngs(0)), nnx.Param))


def test_facts_follow_the_layers():
    data = DataSpec(sequence_length=LENGTH)
    dims = FAMILY.dims(CONFIGS["gemma3"], data)
    assert (dims["window"], dims["windowed_layers"]) == (5, 2)
    dims = FAMILY.dims(CONFIGS["deepseek"], data)
    assert dims["latent"]["head_value"] == 16
    assert dims["experts"]["dense_layers"] == 1
    for name, config in CONFIGS.items():
        weights = sum(
            leaf.size
            for path, leaf in nnx.to_flat_state(weights_of(config))
            if (path[-1] == "kernel" and "experts" not in path and leaf.ndim > 2)
            or path == ("head", "kernel")
        )
        if config.moe is not None:
            experts = config.num_layers - config.moe.dense_layers
            width = config.moe.expert_size(config.mlp_size)
            weights += experts * 3 * 32 * width * config.moe.experts_per_token
        # The rest is attention, whose pairs follow from the windows.
        full, local = LENGTH**2 / 2, LENGTH * 5 - 5**2 / 2
        pairs = sum(local if is_local else full for is_local in config.is_local)
        attended = 6 * pairs * config.num_heads * (config.head_size + config.value_size)
        flops = step_flops(Job(of_dims(FAMILY.dims(config, data)), LENGTH, 1), "causal")
        assert flops == 6 * weights * LENGTH + attended, name


WRONG = {
    "global_every": ({"global_every": 2}, "global_every has no effect without a window"),
    "theta": ({"local_rope_theta": 1e4}, "local_rope_theta has no effect"),
    "latent": ({"latent": LatentConfig(), "num_kv_heads": 2}, "num_kv_heads has no effect"),
    "factors": ({"rope_scaling": LongScaling(short_factors=(1.0,))}, "short_factors has 1 values"),
    "all dense": ({"moe": MoEConfig(dense_layers=4)}, "leaves none of 4 layers to experts"),
    "groups": ({"moe": MoEConfig(groups=3)}, "moe.groups=3 does not divide"),
    "no groups": ({"moe": MoEConfig(groups_per_token=0)}, "moe.groups_per_token is 0; it must be"),
    "few": ({"moe": MoEConfig(groups=8, experts_per_token=2)}, "too small for"),
    "softcap": ({"attention_softcap": 0.0}, "attention_softcap is 0.0"),
    "branches": ({"residual_scale": -1.0}, "residual_scale is -1.0; it must be greater than 0"),
    "sinks": ({"latent": LatentConfig(), "sinks": True}, "no qk_norm, qkv_bias and sinks"),
    "clamped": ({"mlp": "plain", "activation": "clamped_swiglu"}, "set mlp: gated"),
    "biases": (
        {"mlp_bias": True, "moe": MoEConfig(num_shared_experts=1)},
        "mlp_bias has no effect on shared experts",
    ),
}


@pytest.mark.parametrize(("options", "fault"), WRONG.values(), ids=WRONG)
def test_configs_that_do_not_fit_are_refused(options, fault):
    with pytest.raises(ModelError, match=fault):
        make(TransformerConfig(**SIZES, **options), DataSpec(), nnx.Rngs(0))
