"""The UNet of Stable Diffusion: its sizes, its loss, rematerialisation, and what it refuses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardlib.config import from_dict
from shardlib.errors import ModelError
from shardlib.functional import functional
from shardlib.registry import DataSpec
from shardlib_models.diffusion_loss import NUM_STEPS, loss, schedule
from shardlib_models.hf.unet import UNET
from shardlib_models.unet import FAMILY, make
from shardlib_models.unet_config import TAGS, UNetConfig, validate
from shardlib_models.unet_layers import sinusoids

DATA = DataSpec(sequence_length=3, image_shape=(4, 4, 2), context_dim=6, pooled_dim=5)
SMALL = UNetConfig(
    width=8,
    num_resnets=1,
    transformer_depths=(0, 1),
    num_heads=2,
    pooled_dim=5,
    size_dim=4,
    norm_groups=4,
)


def batch_of(rows=4):
    batch = FAMILY.inputs.example(np.random.default_rng(0), rows, DATA)
    return batch | {"weights": np.array([1, 1, 0, 1], np.float32)}


class Stub:
    """A model that predicts twice its input, and notes what it is given."""

    def __init__(self, prediction):
        self.config = dataclasses.replace(SMALL, prediction=prediction)
        self.seen = []

    def __call__(self, *inputs, **conditions):
        self.seen.append((inputs, conditions))
        return 2 * inputs[0]

    def train(self):
        pass

    def eval(self):
        pass


# The numbers of diffusers' UNet2DConditionModel with the published configs.
PUBLISHED = {
    "stable-diffusion-1.5": 859_520_964,
    "stable-diffusion-2.1": 865_910_724,
    "stable-diffusion-xl": 2_567_463_684,
}


@pytest.mark.mesh
@pytest.mark.parametrize(("size", "parameters"), PUBLISHED.items())
def test_published_numbers_of_parameters(size, parameters):
    config = FAMILY.config(**FAMILY.sizes[size])
    shapes = nnx.eval_shape(lambda: make(config, DataSpec(), nnx.Rngs(0)))
    assert sum(x.size for x in jax.tree.leaves(nnx.state(shapes, nnx.Param))) == parameters


def test_published_sizes_are_all_counted():
    assert FAMILY.sizes.keys() == PUBLISHED.keys()


_THREE = ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"]
_TWO = ["DownBlock2D", *["CrossAttnDownBlock2D"] * 2]
# What the published config.json of each says of sizes.
CONFIGS = {
    "stable-diffusion-1.5": {
        "block_out_channels": [320, 640, 1280, 1280],
        "down_block_types": _THREE,
        "attention_head_dim": 8,
        "cross_attention_dim": 768,
    },
    "stable-diffusion-2.1": {
        "block_out_channels": [320, 640, 1280, 1280],
        "down_block_types": _THREE,
        "attention_head_dim": [5, 10, 20, 20],
        "cross_attention_dim": 1024,
        "use_linear_projection": True,
        "upcast_attention": True,
    },
    "stable-diffusion-xl": {
        "block_out_channels": [320, 640, 1280],
        "down_block_types": _TWO,
        "attention_head_dim": [5, 10, 20],
        "transformer_layers_per_block": [1, 2, 10],
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
}


@pytest.mark.parametrize(("size", "theirs"), CONFIGS.items())
def test_published_configs_are_the_sizes(size, theirs):
    ups = [kind.replace("Down", "Up") for kind in reversed(theirs["down_block_types"])]
    channels = {"in_channels": 4, "out_channels": 4, "layers_per_block": 2}
    found = from_dict(UNetConfig, UNET.read({**theirs, **channels, "up_block_types": ups}), size)
    expected = from_dict(UNetConfig, FAMILY.sizes[size], size)
    # The scheduler's config says what is predicted.
    assert dataclasses.replace(found, prediction=expected.prediction) == expected


def test_the_first_and_the_last_noise_level():
    signal, noise = schedule()
    assert signal.shape == noise.shape == (NUM_STEPS,)
    np.testing.assert_allclose(signal**2 + noise**2, 1.0, rtol=1e-6)
    np.testing.assert_allclose(noise[0] ** 2, 0.00085, rtol=1e-6)
    # The last ratio of kept signal is 1 less the last beta.
    np.testing.assert_allclose((signal[-1] / signal[-2]) ** 2, 1 - 0.012, rtol=1e-5)
    # Lin et al. 2024, "Common Diffusion Noise Schedules and Sample Steps Are Flawed", table 1.
    np.testing.assert_allclose(signal[-1], 0.068265, rtol=1e-4)


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
def test_the_loss_is_the_mean_squared_error_of_what_is_predicted(prediction):
    model, batch, key = Stub(prediction), batch_of(), jax.random.key(3)
    mean, metrics = loss(model, batch, key, train=True)
    (noisy, levels, context), conditions = model.seen[0]
    assert not metrics
    assert levels.dtype == jnp.int32
    np.testing.assert_array_equal(context, batch["context"])
    np.testing.assert_array_equal(conditions["sizes"], batch["sizes"])
    signal, noise = (factor[np.asarray(levels)][:, None, None, None] for factor in schedule())
    drawn = (np.asarray(noisy) - signal * batch["latents"]) / noise
    target = drawn if prediction == "epsilon" else signal * drawn - noise * batch["latents"]
    errors = np.mean((2 * np.asarray(noisy) - target) ** 2, axis=(1, 2, 3))
    assert mean.weight == 3
    np.testing.assert_allclose(mean.total, errors[[0, 1, 3]].sum(), rtol=1e-4)
    again, _ = loss(model, batch, key, train=False)
    assert again.total == mean.total
    other, _ = loss(model, batch, jax.random.key(4), train=False)
    assert other.total != mean.total


def test_drawn_levels_and_noise_have_the_moments_of_their_distributions():
    model = Stub("epsilon")
    batch = {
        "latents": np.zeros((4096, 2, 2, 1), np.float32),
        "context": np.zeros((4096, 1, 1), np.float32),
        "weights": np.ones(4096, np.float32),
    }
    loss(model, batch, jax.random.key(0), train=True)
    (noisy, levels, _), _ = model.seen[0]
    assert levels.min() >= 0
    assert levels.max() == NUM_STEPS - 1
    # Five standard errors of each mean.
    assert abs(np.mean(levels) - (NUM_STEPS - 1) / 2) < 5 * NUM_STEPS / np.sqrt(12 * 4096)
    drawn = noisy / schedule()[1][np.asarray(levels)][:, None, None, None]
    assert abs(np.mean(drawn)) < 5 / np.sqrt(drawn.size)
    assert abs(np.var(drawn) - 1) < 5 * np.sqrt(2 / drawn.size)


def test_sinusoids_are_cosines_then_sines():
    found = sinusoids(jnp.array([[0, 500]]), 4)
    expected = [[1, 1, 0, 0], [np.cos(500), np.cos(5), np.sin(500), np.sin(5)]]
    np.testing.assert_allclose(found, [expected], atol=1e-4)


def value_of(policy):
    """Returns a loss of parameters, and parameters that are nowhere 0."""
    config = dataclasses.replace(SMALL, remat=policy)
    module = functional(lambda rngs: make(config, DATA, rngs))

    def value(params):
        model = module.merge(params, state, jax.random.key(0))
        return loss(model, batch_of(), jax.random.key(1), train=True)[0].value

    params, state = jax.eval_shape(module.init, jax.random.key(0))
    return value, jax.tree.map(
        lambda x: 0.3 * jnp.sin(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), params
    )


@pytest.mark.mesh
def test_rematerialisation_keeps_less():
    def kept(policy):
        value, params = value_of(policy)
        pullback = jax.eval_shape(lambda params: jax.vjp(value, params)[1], params)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pullback))

    assert kept("full") < kept("save:conv") < kept("dots") < kept("none")


@pytest.mark.mesh
def test_rematerialisation_changes_no_gradient():
    found, expected = (
        jax.jit(jax.grad(value))(params) for value, params in map(value_of, ("full", "none"))
    )
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6 * largest),
        found,
        expected,
    )
    assert min(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected)) > 0


@pytest.mark.mesh
def test_bfloat16_computes_in_bfloat16_with_a_float32_loss():
    module = functional(lambda rngs: make(SMALL, DATA, rngs))

    def narrow(x):
        return x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x

    def run(key, batch):
        params, state = jax.tree.map(narrow, module.init(key))
        model = module.merge(params, state, key)
        given = {name: narrow(array) for name, array in batch.items()}
        prediction = model(
            given["latents"],
            jnp.zeros(4, jnp.int32),
            given["context"],
            pooled=given["pooled"],
            sizes=given["sizes"],
        )
        return prediction, loss(model, given, key, train=True)[0].value

    batch = jax.tree.map(jnp.asarray, batch_of())
    prediction, value = jax.eval_shape(run, jax.random.key(0), batch)
    assert (prediction.dtype, prediction.shape) == (jnp.bfloat16, (4, 4, 4, 2))
    assert value.dtype == jnp.float32


def test_logical_axes_name_every_dim():
    module = functional(lambda rngs: make(SMALL, DATA, rngs))
    shapes, _ = jax.eval_shape(module.init, jax.random.key(0))
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        assert len(module.axes["/".join(key.key for key in path)]) == leaf.ndim, path
    assert module.axes["conv_out/kernel"] == ("kernel_h", "kernel_w", "conv_in", "channels")


WRONG = {
    "counts": ({"width": 0, "num_heads": 0}, "width is 0.*num_heads is 0"),
    "levels": ({"multipliers": ()}, r"multipliers are \[\]"),
    "depths": ({"transformer_depths": (1,)}, "1 numbers for 2 levels"),
    "negative depths": ({"transformer_depths": (1, -1)}, r"are \[1, -1\]"),
    "groups": ({"norm_groups": 3}, "width=8 is not a multiple of norm_groups=3"),
    "heads": ({"num_heads": 3}, "the 16 channels of level 1 are not a multiple of its 3 heads"),
    "odd sizes": ({"size_dim": 3}, "size_dim=3 is odd"),
    "channels": ({"channels": 3}, "latents of the data have 2 channels, but channels=3"),
    "context": ({"context_dim": 7}, "texts of the data have 6 dims, but context_dim=7"),
    "pooled": ({"pooled_dim": None}, "pooled_dim is null in the model, but 5 in the data"),
    "too deep": (
        {"multipliers": (1, 1, 1, 1), "transformer_depths": (0, 0, 0, 0)},
        "latents of 4 x 4 cannot be halved 3 times",
    ),
    "ranges": ({"remat": "0:full,1-:dots"}, "levels differ; choose one policy"),
    "policy": ({"remat": "save:heads"}, f"Choose among .*{sorted(TAGS)[0]}"),
}


@pytest.mark.parametrize(("changes", "fault"), WRONG.values(), ids=WRONG)
def test_faults_are_named(changes, fault):
    with pytest.raises(ModelError, match=f"(?s)the UNet cannot be made:.*{fault}"):
        make(dataclasses.replace(SMALL, **changes), DATA, nnx.Rngs(0))


def test_unknown_sizes_are_named():
    assert validate(UNetConfig(), DataSpec()) == [
        "channels is unknown: neither the model nor its data set it.",
        "context_dim is unknown: neither the model nor its data set it.",
    ]


def test_inputs_of_other_sizes_are_refused():
    model = nnx.eval_shape(lambda: make(SMALL, DATA, nnx.Rngs(0)))
    zeros = functools.partial(np.zeros, dtype=np.float32)
    with pytest.raises(ModelError) as error:
        model(zeros((2, 5, 4, 2)), zeros(3), zeros((2, 3, 7)), pooled=zeros((2, 5)))
    told = str(error.value)
    for name in ("latents are [2, 5, 4, 2]", "levels is [3]", "context is [2, 3, 7]", "sizes is"):
        assert name in told
    assert "pooled is" not in told
