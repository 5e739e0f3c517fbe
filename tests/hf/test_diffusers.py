"""The UNet of Stable Diffusion: predictions, gradients and files are those of diffusers."""

import json
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import shardlib as sl
from shardlib import hf
from shardlib.errors import ConfigError
from shardlib.hf.safetensors import DIFFUSERS, index_of
from shardlib_models.unet_config import UNetConfig

pytestmark = pytest.mark.mesh

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
safetensors = pytest.importorskip("safetensors.numpy")

ROWS, SIZE, LENGTH, CONTEXT, POOLED, SIZE_DIM = 2, 16, 7, 24, 20, 8


def kinds(*attentive):
    """The blocks of both ways, with attention at some levels."""
    ways = (("Down", attentive), ("Up", attentive[::-1]))
    return {
        f"{way.lower()}_block_types": tuple(
            f"CrossAttn{way}Block2D" if has else f"{way}Block2D" for has in levels
        )
        for way, levels in ways
    }


STYLES = {
    # Heads of other dims at each level, projections as convolutions, none at the last level.
    "1.5": {
        **kinds(True, True, False),
        "block_out_channels": (16, 32, 32),
        "attention_head_dim": 4,
        "layers_per_block": 2,
    },
    # Heads of the same dims, projections as matrices.
    "2.1": {
        **kinds(True, False),
        "block_out_channels": (16, 32),
        "attention_head_dim": (2, 4),
        "use_linear_projection": True,
        "upcast_attention": True,
        "layers_per_block": 1,
    },
    # None at the first level, several layers in a row, pooled texts and sizes.
    "xl": {
        **kinds(False, True, True),
        "block_out_channels": (16, 32, 64),
        "attention_head_dim": (2, 4, 8),
        "transformer_layers_per_block": (1, 2, 3),
        "use_linear_projection": True,
        "layers_per_block": 1,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": SIZE_DIM,
        "projection_class_embeddings_input_dim": POOLED + 6 * SIZE_DIM,
    },
}


def unet(style):
    torch.manual_seed(0)
    model = diffusers.UNet2DConditionModel(
        cross_attention_dim=CONTEXT, norm_num_groups=8, sample_size=SIZE, **STYLES[style]
    )
    with torch.no_grad():
        # Zero biases and unit scales would hide a swap of two of them.
        for tensor in model.parameters():
            tensor.add_(0.05 * torch.randn(tensor.shape))
    return model.eval()


def inputs_of(style):
    random = np.random.default_rng(0)
    inputs = {
        "inputs": random.standard_normal((ROWS, SIZE, SIZE, 4), np.float32),
        "levels": np.array([3, 871], np.int32),
        "context": random.standard_normal((ROWS, LENGTH, CONTEXT), np.float32),
    }
    if style == "xl":
        inputs["pooled"] = random.standard_normal((ROWS, POOLED), np.float32)
        inputs["sizes"] = random.integers(0, 1025, (ROWS, 6), dtype=np.int32)
    return inputs


def theirs_of(model, inputs):
    """The prediction [batch, channels, height, width] of diffusers."""
    given = {name: torch.from_numpy(array) for name, array in inputs.items()}
    added = {"text_embeds": given.get("pooled"), "time_ids": given.get("sizes")}
    return model(
        given["inputs"].permute(0, 3, 1, 2),
        given["levels"],
        given["context"],
        added_cond_kwargs=added if "pooled" in inputs else None,
    ).sample


@pytest.fixture(scope="module", params=STYLES)
def case(request, tmp_path_factory):
    """A folder that diffusers wrote, its inputs and its prediction."""
    model, inputs = unet(request.param), inputs_of(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    with torch.no_grad():
        expected = theirs_of(model, inputs).permute(0, 2, 3, 1).numpy()
    return folder, inputs, expected


@pytest.fixture(autouse=True)
def highest():
    with jax.default_matmul_precision("highest"):
        yield


def close(actual, expected):
    # Sums of at most some thousand float32 products, through about 40 layers.
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_predictions_are_those_of_diffusers_and_an_export_has_the_same_bits(case, tmp_path):
    folder, inputs, expected = case
    loaded = hf.load(folder)
    close(loaded.logits(**inputs), expected)
    hf.save(loaded, tmp_path / "out")
    theirs, ours = (safetensors.load_file(one / DIFFUSERS) for one in (folder, tmp_path / "out"))
    assert theirs.keys() == ours.keys()
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
    again = diffusers.UNet2DConditionModel.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        prediction = theirs_of(again, inputs).permute(0, 2, 3, 1).numpy()
    np.testing.assert_array_equal(prediction, expected)


def test_gradients_are_those_of_diffusers(case, tmp_path):
    """Gradients go into the place of weights, and are compared by the names on disk."""
    folder, inputs, expected = case
    weights = np.random.default_rng(1).normal(size=expected.shape).astype(np.float32)
    model = diffusers.UNet2DConditionModel.from_pretrained(folder)
    torch.sum(theirs_of(model, inputs).permute(0, 2, 3, 1) * torch.from_numpy(weights)).backward()
    theirs = {name: x.grad.numpy() for name, x in model.named_parameters()}

    loaded = hf.load(folder)
    graphdef, params, rest = nnx.split(loaded.model, nnx.Param, ...)
    latents, *others = inputs.values()
    arrays = dict(zip(list(inputs)[1:], others, strict=True))

    @jax.jit
    def loss(params):
        return jnp.sum(nnx.merge(graphdef, params, rest)(latents, **arrays) * weights)

    nnx.update(loaded.model, jax.grad(loss)(params))
    hf.save(loaded, tmp_path / "ours")
    ours = safetensors.load_file(tmp_path / "ours" / DIFFUSERS)
    assert ours.keys() == theirs.keys()
    largest = max(np.abs(x).max() for x in theirs.values())
    for name in ours:
        # Sums of terms that cancel: relative to the gradients of the largest tensors too.
        size = max(np.abs(theirs[name]).max(), 1e-3 * largest)
        assert np.abs(ours[name] - theirs[name]).max() <= 1e-4 * size, name


def test_predictions_on_a_mesh_from_several_files(case, tmp_path):
    folder, inputs, expected = case
    loaded = hf.load(folder)
    hf.save(loaded, tmp_path / "out", max_file_bytes=100_000)
    assert (tmp_path / "out" / index_of(DIFFUSERS)).is_file()
    with sl.use(sl.make_mesh("data=2,fsdp=2,tensor=2"), sl.rules.STANDARD):
        close(hf.load(tmp_path / "out").logits(**inputs), expected)


def test_a_model_of_our_own_is_written_for_diffusers(tmp_path):
    from shardlib.registry import DataSpec
    from shardlib_models.unet import make

    config = UNetConfig(
        width=16, norm_groups=8, num_heads=2, scale_heads=True, channels=4, context_dim=CONTEXT
    )
    hf.save(make(config, DataSpec(), nnx.Rngs(0)), tmp_path / "out")
    model = diffusers.UNet2DConditionModel.from_pretrained(tmp_path / "out")
    assert hf.load(tmp_path / "out").config == config
    with torch.no_grad():
        prediction = theirs_of(model, inputs_of("1.5"))
    # The last convolution is 0 at the start.
    assert torch.all(prediction == 0)


UNREADABLE = {
    "blocks": ({"up_block_types": ["UpBlock2D"] * 3}, "up_block_types is"),
    "widths": ({"block_out_channels": [16, 24, 32]}, "not multiples of the first"),
    "heads": ({"attention_head_dim": [4, 2, 4]}, "are neither equal nor"),
    "inpainting": ({"in_channels": 9}, "in_channels and out_channels differ"),
    "images": ({"addition_embed_type": "image"}, "addition_embed_type is 'image'"),
    "activation": ({"act_fn": "gelu"}, "act_fn is 'gelu'; supported: 'silu'"),
}


@pytest.mark.parametrize(("changes", "fault"), UNREADABLE.values(), ids=UNREADABLE)
def test_other_unets_are_refused(changes, fault, tmp_path):
    unet("1.5").save_config(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=fault):
        hf.load(tmp_path)
