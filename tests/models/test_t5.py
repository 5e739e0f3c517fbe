"""T5: losses on meshes, answers, sizes, and configs that are refused."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.config import from_dict
from shardlib.errors import ModelError
from shardlib.registry import PAIRS, DataSpec
from shardlib_models.sizes import T5_SIZES
from shardlib_models.t5 import FAMILY, make, shifted
from shardlib_models.t5_config import T5Config, validate

DATA = DataSpec(vocab_size=64, sequence_length=16, target_length=8)
SMALL = {"num_layers": 2, "embed_dim": 32, "mlp_dim": 48}

# As the pages of the models on the hub count them.
V11 = {
    "small": 76_961_152,
    "base": 247_577_856,
    "large": 783_150_080,
    "xl": 2_849_757_184,
    "xxl": 11_135_332_352,
}
PUBLISHED = {
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    **{f"t5-v1.1-{size}": count for size, count in V11.items()},
    **{f"flan-t5-{size}": count for size, count in V11.items()},
}


@pytest.mark.rest("mesh", keep=2)
@pytest.mark.parametrize("size", T5_SIZES)
def test_sizes_have_the_published_numbers_of_parameters(size):
    config = from_dict(T5Config, T5_SIZES[size], size)
    assert validate(config, DataSpec()) == []
    state = jax.eval_shape(lambda: nnx.state(make(config, DataSpec(), nnx.Rngs(0)), nnx.Param))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state)) == PUBLISHED[size]


# The first two, and the mesh of other options, split along every axis.
MESHES = (
    "data=2,fsdp=2,tensor=2",
    "data=2,tensor=2,context=2",
    "fsdp=2,tensor=2,stage=2",
    "data=8",
    "fsdp=8",
)
# Operation by operation, a call compiles a hundred programs.
call = nnx.jit(lambda model, *inputs, **named: model(*inputs, **named))

OTHER_OPTIONS = {"mlp": "gated_gelu", "tied_embeddings": False, "remat": "full"}


def batch(rows=8):
    return PAIRS.example(np.random.default_rng(0), rows, DATA)


def losses(mesh, devices=None, steps=3, **options):
    config = T5Config(**SMALL, **options)
    with sl.use(sl.make_mesh(mesh, devices=devices), sl.rules.STANDARD):
        state = sl.init_state(lambda rngs: make(config, DATA, rngs), optax.adam(1e-2))
        step = sl.make_train_step(
            lambda model, batch, rng: FAMILY.loss(model, batch, rng, train=True),
            microbatches=2 if "stage" in mesh else 1,
        )
        found = []
        for _ in range(steps):
            state, metrics = step(state, batch())
            found.append(float(metrics["loss"]))
    return np.array(found)


@pytest.mark.mesh
@pytest.mark.rest("soak", keep=2)
@pytest.mark.parametrize("mesh", MESHES)
def test_losses_on_meshes_are_those_of_one_device(mesh):
    with jax.default_matmul_precision("highest"):
        expected = one_device()
        # Sums in another order, through three updates of Adam.
        np.testing.assert_allclose(losses(mesh), expected, rtol=2e-5)
    assert np.ptp(expected) > 1e-3


@functools.cache
def one_device():
    return losses("data=1", jax.devices()[:1])


@pytest.mark.soak
@pytest.mark.parametrize("mesh", MESHES)
def test_losses_with_other_options_on_meshes_are_those_of_one_device(mesh):
    with jax.default_matmul_precision("highest"):
        expected = losses("data=1", jax.devices()[:1], **OTHER_OPTIONS)
        np.testing.assert_allclose(losses(mesh, **OTHER_OPTIONS), expected, rtol=2e-5)


@pytest.mark.mesh
def test_other_options_on_a_mesh(monkeypatch):
    # The vectors of the decoder's few tokens are exchanged, those of the encoder looked up in the
    # whole table.
    monkeypatch.setattr("shardlib.nn.lookup.MIN_WIDTH", 1)
    with jax.default_matmul_precision("highest"):
        expected = losses("data=1", jax.devices()[:1], **OTHER_OPTIONS)
        found = losses("fsdp=2,tensor=2,stage=2", **OTHER_OPTIONS)
    np.testing.assert_allclose(found, expected, rtol=2e-5)


def test_the_decoder_reads_the_target_before_and_a_start_token_in_each_segment():
    targets = jnp.array([[5, 6, 7, 8, 0]], jnp.int32)
    ids = jnp.array([[1, 1, 2, 2, 0]], jnp.int32)
    np.testing.assert_array_equal(shifted(targets, ids, 3), [[3, 5, 3, 7, 3]])


@functools.cache
def made(**options):
    config = T5Config(**SMALL, num_decoder_layers=3, init_factor=2.0, **options)
    return jax.jit(lambda: nnx.split(make(config, DATA, nnx.Rngs(0))))()


@pytest.mark.mesh
def test_padding_and_packing_do_not_change_logits():
    model = nnx.merge(*made())
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 2, 64, jnp.int32)
    answers = jax.random.randint(jax.random.key(2), (2, 8), 2, 64, jnp.int32)
    alone = [
        call(model, tokens[:, part], decoder_tokens=answers[:, other])
        for part, other in ((slice(10), slice(5)), (slice(10, 16), slice(5, 8)))
    ]
    ids = jnp.where(jnp.arange(16) < 10, 1, 2)[None] * jnp.ones((2, 1), jnp.int32)
    answer_ids = jnp.where(jnp.arange(8) < 5, 1, 2)[None] * jnp.ones((2, 1), jnp.int32)
    segments = {"segment_ids": ids, "decoder_segment_ids": answer_ids}
    packed = call(model, tokens, decoder_tokens=answers, **segments)
    # Sums of the same numbers and zeros.
    size = float(jnp.abs(packed).max())
    np.testing.assert_allclose(packed, jnp.concatenate(alone, axis=1), atol=1e-5 * size)


@functools.partial(jax.jit, static_argnums=0, static_argnames="length")
def generate(graphdef, state, tokens, ids=None, *, length, temperature=0.0, seed=0):
    options = {"length": length, "temperature": temperature, "rng": jax.random.key(seed)}
    return FAMILY.generate(nnx.merge(graphdef, state), tokens, segment_ids=ids, **options)


def prompts():
    tokens = jax.random.randint(jax.random.key(3), (4, 10), 2, 64, jnp.int32)
    sizes = jnp.array([10, 7, 10, 3])
    return tokens, (jnp.arange(10)[None] < sizes[:, None]).astype(jnp.int32)


@pytest.mark.mesh
@pytest.mark.rest("soak")
@pytest.mark.parametrize("options", [{}, {"dropout": 0.5, "remat": "full"}], ids=str)
def test_cached_steps_equal_the_whole_answer(options):
    graphdef, state = made(**options)
    tokens, ids = prompts()
    out = generate(graphdef, state, tokens, ids, length=12)
    assert out.shape == (4, 22)
    np.testing.assert_array_equal(out[:, :10], tokens)
    model = nnx.merge(graphdef, state)
    model.eval()
    before = jnp.pad(out[:, 10:-1], ((0, 0), (1, 0)))
    best = jnp.argmax(call(model, tokens, decoder_tokens=before, segment_ids=ids), axis=-1)
    np.testing.assert_array_equal(out[:, 10:], best)
    assert len(np.unique(out[:, 10:])) > 3


@pytest.mark.mesh
def test_sampling_depends_on_the_key():
    def run(**options):
        return generate(*made(), *prompts(), length=8, **options)

    np.testing.assert_array_equal(run(temperature=1.0), run(temperature=1.0))
    assert not jnp.array_equal(run(temperature=1.0), run(temperature=1.0, seed=1))
    # So cold that only the likeliest token is drawn.
    np.testing.assert_array_equal(run(temperature=1e-6), run())


def test_nothing_to_answer_is_refused():
    tokens, _ = prompts()
    with pytest.raises(ModelError, match=r"cannot answer 0 tokens with 3\.\n  Give inputs of 1"):
        generate(*made(), tokens[:, :0], length=3)


WRONG = {
    "heads": ({"num_heads": 3}, "embed_dim=32 is not a multiple of num_heads=3.*set head_dim"),
    "layers": ({"num_decoder_layers": 0}, "num_decoder_layers is 0"),
    "dropout": ({"dropout": 1.0}, "dropout is 1.0"),
    "vocabulary": ({"vocab_size": 8}, "the data have 64 tokens, but vocab_size=8"),
    "start token": ({"start_token": 64}, r"start_token is 64; it must be in \[0, 64\)"),
    "buckets": ({"relative_buckets": 6}, "relative_buckets is 6; it must be a multiple of 4"),
    "distance": ({"relative_max_distance": 16}, "relative_max_distance is 16; it must be greater"),
    "remat": ({"remat": "save:nothing"}, "nothing"),
}


@pytest.mark.parametrize(("changes", "fault"), WRONG.values(), ids=WRONG)
def test_faults_are_named(changes, fault):
    config = T5Config(**{**SMALL, **changes})
    with pytest.raises(ModelError, match=fault):
        make(config, DATA, nnx.Rngs(0))
