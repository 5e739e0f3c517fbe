"""CLIP: features, gradients and bits of transformers, one loss for a batch on every mesh."""

import dataclasses
import json
import math
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib import hf
from shardlib.config import from_dict, load
from shardlib.errors import ConfigError, ModelError
from shardlib.registry import IMAGE_TEXT, DataSpec, family
from shardlib.run import RunConfig
from shardlib.run.checks import check_fit
from shardlib_models.clip import ClipConfig, ClipImageConfig, ClipTextConfig, loss, make
from shardlib_models.sizes import CLIP_SIZES

VOCAB, LENGTH, ROWS, END = 96, 12, 8, 90
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TEXT = {**SIZES, "num_attention_heads": 4, "vocab_size": VOCAB, "max_position_embeddings": 16}
IMAGE = {**SIZES, "hidden_size": 48, "num_attention_heads": 6, "image_size": 8, "patch_size": 4}
SMALL = ClipConfig(
    text=ClipTextConfig(num_layers=2, embed_dim=32, vocab_size=VOCAB, max_positions=16),
    image=ClipImageConfig(num_layers=2, embed_dim=32, image_size=8, patch_size=4, channels=3),
    feature_dim=16,
)


@pytest.fixture(autouse=True)
def highest():
    with jax.default_matmul_precision("highest"):
        yield


def batch(end=END):
    """Texts that end at different places, with a later copy of the end."""
    random = np.random.default_rng(0)
    tokens = random.integers(3, 80, (ROWS, LENGTH), dtype=np.int32)
    tokens[np.arange(ROWS), 4 + np.arange(ROWS) % 5] = end
    tokens[:, -1] = end
    return {"tokens": tokens, "images": random.standard_normal((ROWS, 8, 8, 3), np.float32)}


def theirs_of(model, arrays):
    import torch

    out = model.eval()(
        input_ids=torch.from_numpy(arrays["tokens"].astype(np.int64)),
        pixel_values=torch.from_numpy(arrays["images"].transpose(0, 3, 1, 2).copy()),
        return_loss=True,
    )
    return torch.stack([out.text_embeds, out.image_embeds], 1), out


@pytest.fixture(scope="module", params=[END, 2], ids=["end by its id", "end by the largest id"])
def case(request, tmp_path_factory):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    text = {**TEXT, "eos_token_id": request.param, "bos_token_id": 1, "pad_token_id": 0}
    config = transformers.CLIPConfig(text_config=text, vision_config=IMAGE, projection_dim=16)
    model = transformers.CLIPModel(config)
    with torch.no_grad():
        for tensor in {x.data_ptr(): x for x in model.state_dict().values()}.values():
            if tensor.is_floating_point():
                tensor.add_(0.1 * torch.randn(tensor.shape))
    folder = tmp_path_factory.mktemp("clip")
    model.save_pretrained(folder)
    return folder, model


def error(actual, expected):
    return np.abs(np.asarray(actual) - expected).max() / np.abs(expected).max()


@pytest.mark.mesh
def test_features_and_gradients_are_those_of_transformers(case, tmp_path):
    folder, model = case
    arrays = batch()
    features, out = theirs_of(model, arrays)
    expected = features.detach().numpy()
    loaded = hf.load(folder)
    assert error(loaded.logits(arrays["tokens"], images=arrays["images"]), expected) < 1e-5
    hf.save(loaded, tmp_path / "out")
    again = type(model).from_pretrained(tmp_path / "out")
    # What shardlib does not read is kept.
    assert again.config.text_config.pad_token_id == 0
    np.testing.assert_array_equal(theirs_of(again, arrays)[0].detach().numpy(), expected)

    out.loss.backward()

    def of_params(params, rest):
        merged = nnx.merge(nnx.graphdef(loaded.model), params, rest)
        mean, _ = loss(merged, jax.tree.map(jnp.asarray, arrays), jax.random.key(0), train=False)
        return mean.value

    params, rest = nnx.state(loaded.model, nnx.Param), nnx.state(loaded.model, nnx.Not(nnx.Param))
    value, grads = jax.jit(jax.value_and_grad(of_params))(params, rest)
    assert float(value) == pytest.approx(out.loss.item(), rel=1e-5)
    ours = grads["text"]["layers"]["mlp"]["up"]["kernel"][...]
    layers = model.text_model.encoder.layers
    theirs = np.stack([layer.mlp.fc1.weight.grad.numpy().T for layer in layers])
    assert error(ours, theirs) < 1e-4
    theirs = model.vision_model.embeddings.patch_embedding.weight.grad.numpy()
    ours = np.transpose(grads["image"]["patches"]["projection"]["kernel"][...], (3, 2, 0, 1))
    assert error(ours, theirs) < 1e-4
    assert float(grads["log_scale"][...]) == pytest.approx(model.logit_scale.grad.item(), rel=1e-3)


@pytest.mark.mesh
@pytest.mark.parametrize("mesh", ["fsdp=8", "fsdp=4,tensor=2", "data=2,fsdp=2,tensor=2"])
def test_features_are_the_same_on_every_mesh(case, mesh):
    folder, model = case
    arrays = batch()
    expected = theirs_of(model, arrays)[0].detach().numpy()
    with sl.use(sl.make_mesh(mesh), sl.rules.STANDARD):
        found = hf.load(folder).logits(arrays["tokens"], images=arrays["images"])
    assert error(found, expected) < 1e-5


@pytest.mark.mesh
def test_a_field_read_wrongly_would_be_told(case, tmp_path):
    folder, model = case
    arrays = batch()
    expected = theirs_of(model, arrays)[0].detach().numpy()
    hf.save(hf.load(folder), tmp_path / "copy")
    source = json.loads((tmp_path / "copy" / "config.json").read_text())
    source["vision_config"]["hidden_act"] = "gelu"
    (tmp_path / "copy" / "config.json").write_text(json.dumps(source))
    wrong = hf.load(tmp_path / "copy")
    assert error(wrong.logits(arrays["tokens"], images=arrays["images"]), expected) > 1e-4
    source["vision_config"]["hidden_act"] = "swish"
    (tmp_path / "copy" / "config.json").write_text(json.dumps(source))
    with pytest.raises(ConfigError, match=r"vision_config.hidden_act is 'swish'; supported"):
        hf.load(tmp_path / "copy")


def trained(mesh):
    devices = jax.devices()[:1] if mesh == "data=1" else None
    arrays = {**batch(), "segment_ids": np.ones((ROWS, LENGTH), np.int32)}
    arrays["segment_ids"][-1] = 0  # a row of padding
    with sl.use(sl.make_mesh(mesh, devices=devices), sl.rules.STANDARD):
        state = sl.init_state(lambda rngs: make(SMALL, DataSpec(), rngs), optax.adam(1e-2))

        def of_batch(model, batch, rng):
            return loss(model, batch, rng, train=True)

        step, found = sl.make_train_step(of_batch, batch_axes=IMAGE_TEXT.axes), []
        for _ in range(4):
            state, metrics = step(state, arrays)
            found.append((float(metrics["loss"]), float(metrics["accuracy"])))
    return found


@pytest.fixture(scope="module")
def trained_on_one():
    return trained("data=1")


@pytest.mark.mesh
@pytest.mark.rest("soak", keep=2)
@pytest.mark.parametrize("mesh", ["data=8", "data=2,fsdp=2,tensor=2", "fsdp=4,tensor=2"])
def test_all_rows_of_a_batch_compete_on_every_mesh(trained_on_one, mesh):
    assert trained_on_one[-1][0] < trained_on_one[0][0]
    np.testing.assert_allclose(trained(mesh), trained_on_one, rtol=2e-5)


@pytest.mark.parametrize("log_scale", [1.0, 6.0], ids=["free", "above 100"])
def test_the_loss_is_that_of_the_paper(log_scale):
    random = np.random.default_rng(1)
    text, image = random.standard_normal((2, 4, 16)).astype(np.float32)
    text[3] = 0.0  # padding

    class Fixed(nnx.Module):
        def __init__(self):
            self.log_scale = nnx.Param(jnp.float32(log_scale))

        def __call__(self, tokens, images, segment_ids):
            return jnp.stack([jnp.asarray(text), jnp.asarray(image)], 1)

    ids = np.array([[1], [1], [1], [0]], np.int32)
    arrays = {"tokens": ids, "images": image, "segment_ids": jnp.asarray(ids)}
    mean, metrics = loss(Fixed(), arrays, jax.random.key(0), train=False)
    scores = min(np.exp(log_scale), 100.0) * text[:3].astype(np.float64) @ image[:3].T
    shifted = [s - s.max(1, keepdims=True) for s in (scores, scores.T)]
    logs = [s - np.log(np.exp(s).sum(1, keepdims=True)) for s in shifted]
    expected = -np.mean([np.diag(log) for log in logs])
    np.testing.assert_allclose(mean.value, expected, rtol=1e-5)
    hits = np.mean([np.argmax(log, 1) == np.arange(3) for log in logs])
    np.testing.assert_allclose(metrics["accuracy"].value, hits, rtol=1e-6)
    # Above the bound the scale can still fall.
    gradient = nnx.grad(lambda model: loss(model, arrays, jax.random.key(0), train=False)[0].value)
    assert gradient(Fixed())["log_scale"][...] != 0


def test_wrong_configs_are_refused():
    data = DataSpec(vocab_size=VOCAB + 1, sequence_length=20, image_shape=(9, 9, 3))
    with pytest.raises(ModelError) as raised:
        make(dataclasses.replace(SMALL, feature_dim=0), data, nnx.Rngs(0))
    for text in ("text.vocab_size=96", "max_positions=16", "feature_dim is 0", "image: the images"):
        assert text in str(raised.value)


def test_a_text_ends_where_the_data_ends_it():
    data = DataSpec(vocab_size=VOCAB, end_token=7)
    for known, end in ((data, 7), (DataSpec(), None)):
        model = nnx.eval_shape(lambda known=known: make(SMALL, known, nnx.Rngs(0)))
        assert model.text.config.end_token == end
    text = dataclasses.replace(SMALL.text, end_token=END)
    with pytest.raises(ModelError, match=r"with token 7, but text.end_token=90; let data.tokeni"):
        make(dataclasses.replace(SMALL, text=text), data, nnx.Rngs(0))


FOREIGN = {
    "images of another size": (
        {"images": (4, 9, 9, 3)},
        r"float32\[4, 9, 9, 3\], .*\[4, 8, 8, 3\]",
    ),
    "grey images": ({"images": (4, 8, 8, 1)}, r"float32\[4, 8, 8, 1\], expected"),
    "texts too long": ({"tokens": (4, 17)}, r"17 tokens, more than text.max_positions=16"),
    "another batch": ({"images": (3, 8, 8, 3)}, r"float32\[3, 8, 8, 3\], .*\[4, 8, 8, 3\]"),
    "other segments": ({"segment_ids": (4, 9)}, r"segment_ids are \[4, 9\], expected \[4, 12\]"),
}


@pytest.fixture(scope="module")
def small():
    return nnx.eval_shape(lambda: make(SMALL, DataSpec(), nnx.Rngs(0)))


def zeros(**changed):
    shapes = {"tokens": (4, 12), "images": (4, 8, 8, 3), "segment_ids": (4, 12)} | changed
    return {
        name: jnp.zeros(shape, jnp.float32 if name == "images" else jnp.int32)
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize(("changed", "message"), FOREIGN.values(), ids=FOREIGN)
def test_foreign_inputs_are_refused(small, changed, message):
    with pytest.raises(ModelError, match=message):
        small(**zeros(**changed))


def test_all_foreign_inputs_are_named_at_once(small):
    arrays = zeros(tokens=(4, 17), images=(4, 9, 9, 3))
    arrays["images"] = arrays["images"].astype(jnp.uint8)
    with pytest.raises(ModelError, match=r"(?s)17 tokens.*uint8\[4, 9, 9, 3\].*\n  Give one image"):
        small(**arrays)


@pytest.mark.mesh
def test_a_loaded_clip_refuses_arrays_before_it_is_traced(case):
    loaded, arrays = hf.load(case[0]), batch()
    tokens, images = arrays["tokens"], arrays["images"]
    with pytest.raises(ModelError, match=r"8 rows, but other .*: images \[3, 8, 8, 3\]"):
        loaded.logits(tokens, images=images[:3])
    with pytest.raises(ModelError, match=r"a Clip takes tokens, images.*missing .*'images'"):
        loaded.logits(tokens)
    with pytest.raises(ModelError, match=r"unexpected keyword argument 'pixels'"):
        loaded.logits(tokens, images=images, pixels=images)
    with pytest.raises(ModelError, match=rf"to {VOCAB} are not within the {VOCAB}"):
        loaded.logits(np.where(tokens == END, VOCAB, tokens), images=images)


# As the pages of the models on the hub count them.
PUBLISHED = {
    "clip-vit-base-patch32": 151_277_313,
    "clip-vit-base-patch16": 149_620_737,
    "clip-vit-large-patch14": 427_616_513,
}


@pytest.mark.parametrize("name", CLIP_SIZES)
def test_published_sizes(name):
    config = from_dict(ClipConfig, CLIP_SIZES[name], name)
    abstract = nnx.eval_shape(lambda: make(config, DataSpec(), nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(abstract, nnx.Param))
    assert sum(math.prod(leaf.shape) for leaf in leaves) == PUBLISHED[name]


SPLIT = {
    "microbatches": ("train.microbatches=2", "train.microbatches"),
    "groups": ("train.reduction.dtype=f32", "train.reduction"),
}


@pytest.mark.parametrize(("word", "key"), SPLIT.values(), ids=SPLIT)
def test_a_batch_is_not_split(word, key):
    config = load(RunConfig, None, ["model.num_layers=1", "data.path=builtin:python", word])
    model = dataclasses.replace(SMALL)
    chosen = dataclasses.replace(
        family("clip"), inputs=dataclasses.replace(IMAGE_TEXT, name=config.data.gives)
    )
    data = DataSpec(vocab_size=VOCAB, sequence_length=8, image_shape=(8, 8, 3))
    with pytest.raises(ConfigError, match=rf"compares all rows of a batch, which {key} would"):
        check_fit(dataclasses.replace(config, model=model), chosen, data)
