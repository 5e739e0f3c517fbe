"""Encoders and image models: the logits of transformers, the same bits back, on every mesh."""

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
from shardlib.errors import CheckpointError, ConfigError, ModelError
from shardlib.functional import functional
from shardlib.hf.architecture import find_architecture
from shardlib.hf.safetensors import SINGLE
from shardlib.registry import DataSpec
from shardlib_models.hf.resnet import RESNET

pytestmark = pytest.mark.mesh

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.numpy")

VOCAB, LENGTH = 96, 24
BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def bert(head, **options):
    return getattr(transformers, f"BertFor{head}")(transformers.BertConfig(**BERT, **options))


def roberta(head, **options):
    config = transformers.RobertaConfig(**BERT, **options)
    return getattr(transformers, f"RobertaFor{head}")(config)


def headless(kind, **options):
    config = getattr(transformers, f"{kind}Config")(**BERT, **options)
    return getattr(transformers, f"{kind}Model")(config)


def vit(**options):
    sizes = {name: x for name, x in BERT.items() if "position" not in name and name != "vocab_size"}
    config = transformers.ViTConfig(
        **sizes, image_size=16, patch_size=4, num_labels=8, layer_norm_eps=1e-6, **options
    )
    return transformers.ViTForImageClassification(config)


def resnet(depths, kind):
    sizes = [8 * 2**i * (4 if kind == "bottleneck" else 1) for i in range(4)]
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=sizes, depths=depths, layer_type=kind, num_labels=8
    )
    return transformers.ResNetForImageClassification(config)


# The model of each architecture, and a change of config.json that its logits must tell.
CASES = {
    "bert, masked": (lambda: bert("MaskedLM"), {"hidden_act": "relu"}),
    "bert, classifier": (
        lambda: bert("SequenceClassification", num_labels=8),
        {"layer_norm_eps": 1e-3},
    ),
    "bert, spans": (
        lambda: bert("QuestionAnswering", hidden_act="relu"),
        {"num_attention_heads": 8},
    ),
    "roberta, masked": (lambda: roberta("MaskedLM"), {"layer_norm_eps": 1e-3}),
    "roberta, classifier": (
        lambda: roberta("SequenceClassification", num_labels=8),
        {"pad_token_id": 0},
    ),
    "roberta, spans": (lambda: roberta("QuestionAnswering"), {"layer_norm_eps": 1e-3}),
    "bert, no head": (lambda: headless("Bert"), {"hidden_act": "relu"}),
    "roberta, no head": (lambda: headless("Roberta"), {"layer_norm_eps": 1e-3}),
    "xlm-roberta, no head": (lambda: headless("XLMRoberta"), {"pad_token_id": 0}),
    "vit": (vit, {"layer_norm_eps": 1e-3}),
    "resnet, basic": (lambda: resnet([2, 2, 2, 2], "basic"), {}),
    "resnet, bottleneck": (lambda: resnet([3, 4, 6, 3], "bottleneck"), {}),
}


def texts():
    random = np.random.default_rng(0)
    tokens = random.integers(3, VOCAB, (2, LENGTH), dtype=np.int32)
    padded = np.arange(LENGTH)[None] < np.array([[LENGTH], [LENGTH - 5]])
    tokens = np.where(padded, tokens, 1).astype(np.int32)
    types = random.integers(0, 2, (2, LENGTH), dtype=np.int32)
    return {"inputs": tokens, "segment_ids": padded.astype(np.int32), "types": types}


def images():
    return {"inputs": np.random.default_rng(0).standard_normal((2, 16, 16, 3), np.float32)}


def theirs_of(model, inputs):
    if inputs["inputs"].ndim == 4:
        images = torch.from_numpy(inputs["inputs"].transpose(0, 3, 1, 2).copy())
        return model.eval()(pixel_values=images).logits
    theirs = {"inputs": "input_ids", "segment_ids": "attention_mask", "types": "token_type_ids"}
    arrays = {theirs[k]: torch.from_numpy(x.astype(np.int64)) for k, x in inputs.items()}
    out = model.eval()(**arrays)
    if "start_logits" in out:
        return torch.stack([out.start_logits, out.end_logits], -1)
    return out.logits if "logits" in out else out.last_hidden_state


def oracle(model, inputs):
    with torch.no_grad():
        return theirs_of(model, inputs).numpy()


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """A folder that transformers wrote, with random weights, its inputs and its logits."""
    make, change = CASES[request.param]
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        # Zero biases and unit scales would hide a swap of two of them.
        for tensor, name in {x.data_ptr(): (x, n) for n, x in model.state_dict().items()}.values():
            if tensor.is_floating_point():
                noise = 0.1 * torch.randn(tensor.shape)
                tensor.add_(noise.abs() if name.endswith("running_var") else noise)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    inputs = texts() if hasattr(model.config, "vocab_size") else images()
    return folder, inputs, type(model), oracle(model, inputs), change


def error(loaded, inputs, expected):
    actual = np.asarray(loaded.logits(**inputs))
    assert actual.shape == expected.shape
    if actual.ndim == 3:
        seen = inputs["segment_ids"] > 0
        actual, expected = actual[seen], expected[seen]
    return np.abs(actual - expected).max() / np.abs(expected).max()


@pytest.fixture(autouse=True)
def highest():
    with jax.default_matmul_precision("highest"):
        yield


TOLERANCE = 1e-5


def test_logits_are_those_of_transformers_and_an_export_has_the_same_bits(case, tmp_path):
    folder, inputs, kind, expected, _ = case
    loaded = hf.load(folder)
    assert error(loaded, inputs, expected) < TOLERANCE
    hf.save(loaded, tmp_path / "out")
    again, told = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    np.testing.assert_array_equal(oracle(again, inputs), expected)
    # transformers makes a pooler, which no embedding reads.
    assert all(name.startswith("pooler.") for name in told["missing_keys"])


def test_a_field_read_wrongly_would_be_told(case, edited, monkeypatch):
    folder, inputs, _, expected, change = case
    if not change:  # no field of config.json changes a ResNet and keeps its tensors
        monkeypatch.setitem(RESNET.ours, "bn_eps", 1e-3)
    if "pad_token_id" in change:
        change = change | {"max_position_embeddings": 64}
    assert error(hf.load(edited(folder, change)), inputs, expected) > 10 * TOLERANCE


def test_gradients_are_those_of_transformers(case, tmp_path):
    """Gradients go into the place of weights, and are compared by the names on disk."""
    folder, inputs, kind, expected, _ = case
    weights = np.random.default_rng(1).normal(size=expected.shape).astype(np.float32)
    if weights.ndim == 3:
        weights[inputs["segment_ids"] == 0] = 0.0
    model = kind.from_pretrained(folder, dtype=torch.float32)
    torch.sum(theirs_of(model, inputs) * torch.from_numpy(weights)).backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(tmp_path / "theirs")

    loaded = hf.load(folder)
    graphdef, params, rest = nnx.split(loaded.model, nnx.Param, ...)
    first, *others = inputs.values()
    arrays = dict(zip(list(inputs)[1:], others, strict=True))

    @jax.jit
    def loss(params):
        return jnp.sum(nnx.merge(graphdef, params, rest)(first, **arrays) * weights)

    nnx.update(loaded.model, jax.grad(loss)(params))
    hf.save(loaded, tmp_path / "ours")
    theirs, ours = (safetensors.load_file(tmp_path / one / SINGLE) for one in ("theirs", "ours"))
    scale = {name: np.abs(theirs[name]).max() for name in ours}
    for name in ours:
        # Sums of terms that cancel: relative to the gradients of the largest tensors too.
        size = max(scale[name], 1e-3 * max(scale.values()))
        assert np.abs(ours[name] - theirs[name]).max() <= 1e-4 * size, name


def test_names_of_the_first_checkpoints(tmp_path):
    torch.manual_seed(0)
    model = bert("MaskedLM").eval()
    model.save_pretrained(tmp_path)
    tensors = safetensors.load_file(tmp_path / SINGLE)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): x
        for name, x in tensors.items()
    }
    old["bert.pooler.dense.bias"] = old["cls.predictions.decoder.bias"] = np.zeros(VOCAB, "f4")
    old["cls.seq_relationship.bias"] = np.zeros(2, "f4")
    safetensors.save_file(old, tmp_path / SINGLE)
    inputs = texts()
    assert error(hf.load(tmp_path), inputs, oracle(model, inputs)) < TOLERANCE


@pytest.mark.parametrize("family", ["bert_classifier", "bert_spans"])
def test_a_head_of_its_own_on_the_first_checkpoints(tmp_path, caplog, family):
    """The published files for pre-training: old names, a pooler, and heads that are left out."""
    torch.manual_seed(0)
    model = transformers.BertForPreTraining(transformers.BertConfig(**BERT)).eval()
    model.save_pretrained(tmp_path)
    held = safetensors.load_file(tmp_path / SINGLE)
    safetensors.save_file(
        {k.replace("Norm.weight", "Norm.gamma"): x for k, x in held.items()}, tmp_path / SINGLE
    )
    source = json.loads((tmp_path / "config.json").read_text())
    source["architectures"] = ["BertForMaskedLM"]
    (tmp_path / "config.json").write_text(json.dumps(source))
    found = hf.describe(tmp_path, weights=True, family=family)
    assert "num_classes" not in found.fields
    data = DataSpec(num_classes=3)
    module = functional(lambda rngs: found.family.make(found.config, data, rngs))
    placed = hf.placements(module, None, state=True)
    arrays = hf.read_params(found, module, placed, lambda path: None)
    assert placed.keys() - arrays.keys() == {"head/kernel", "head/bias"}
    assert ("pooler/kernel" in arrays) == (family == "bert_classifier")
    name = "bert.encoder.layer.2.output.dense.weight"
    np.testing.assert_array_equal(arrays["encoder/layers/mlp/down/kernel"][2], held[name].T)
    assert "the parameters head/bias, head/kernel are drawn at random" in caplog.text
    held.pop("bert.embeddings.word_embeddings.weight")
    safetensors.save_file(held | {"bert.new": held[name]}, tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match=r"word_.* is missing.*\n  bert.new is not a tensor"):
        hf.read_params(found, module, placed, lambda path: None)


@pytest.mark.parametrize(
    "mesh", ["fsdp=4,tensor=2", pytest.param("fsdp=8", marks=pytest.mark.soak)]
)
def test_on_every_mesh(case, tmp_path, mesh):
    folder, inputs, kind, expected, _ = case
    with sl.use(sl.make_mesh(mesh), sl.rules.STANDARD):
        loaded = hf.load(folder)
        assert error(loaded, inputs, expected) < TOLERANCE
        hf.save(loaded, tmp_path / "out", max_file_bytes=10_000)
    params = jax.tree.leaves(nnx.state(loaded.model, nnx.Param))
    assert not all(x.sharding.is_fully_replicated for x in params)
    np.testing.assert_array_equal(oracle(kind.from_pretrained(tmp_path / "out"), inputs), expected)


def sizes_of_resnet(**changes):
    return {
        "embedding_size": 4,
        "hidden_sizes": [16, 32, 64, 128],
        "depths": [3, 4, 6, 3],
        **changes,
    }


WRONG = {
    "bert, a decoder": ("BertForMaskedLM", {**BERT, "is_decoder": True}, "is_decoder is True"),
    "roberta, another activation": (
        "RobertaForMaskedLM",
        {**BERT, "hidden_act": "relu"},
        "hidden_act is 'relu'; supported: 'gelu'",
    ),
    "vit, without biases": (
        "ViTForImageClassification",
        {**BERT, "qkv_bias": False},
        "qkv_bias is False",
    ),
    "resnet, another depth": (
        "ResNetForImageClassification",
        sizes_of_resnet(depths=[1, 1, 1, 1]),
        r"depths=\[1, 1, 1, 1\].* are not the sizes of ResNet 18, 34",
    ),
    "resnet, another width": (
        "ResNetForImageClassification",
        sizes_of_resnet(hidden_sizes=[8, 16, 32, 64]),
        r"hidden_sizes=\[8, 16, 32, 64\] are not the sizes of ResNet 18, 34",
    ),
    "resnet, the first version": (
        "ResNetForImageClassification",
        sizes_of_resnet(downsample_in_bottleneck=True),
        "downsample_in_bottleneck is True; supported: False",
    ),
}


@pytest.mark.parametrize(("name", "config", "fault"), WRONG.values(), ids=WRONG)
def test_configs_that_no_model_has_are_refused(name, config, fault):
    with pytest.raises(ConfigError, match=fault):
        find_architecture(name)[1].read(config)


def test_images_of_another_kind_are_refused(tmp_path):
    vit().save_pretrained(tmp_path)
    loaded = hf.load(tmp_path)
    with pytest.raises(ModelError, match=r"the images are int32.*expected floating.*\n  Scale"):
        loaded.logits(np.zeros((1, 16, 16, 3), np.int32))
    with pytest.raises(ModelError, match=r"are \[8, 8, 3\], expected \[16, 16, 3\].*\n  Resize"):
        loaded.logits(np.zeros((1, 8, 8, 3), np.float32))


def test_a_head_on_a_folder_without_one(tmp_path, caplog):
    torch.manual_seed(0)
    model = headless("Bert").eval()
    model.save_pretrained(tmp_path)
    found = hf.describe(tmp_path, weights=True, family="bert_classifier")
    data = DataSpec(num_classes=3)
    module = functional(lambda rngs: found.family.make(found.config, data, rngs))
    arrays = hf.read_params(found, module, hf.placements(module, None), lambda path: None)
    expected = model.state_dict()["encoder.layer.2.output.dense.weight"].numpy()
    np.testing.assert_array_equal(arrays["encoder/layers/mlp/down/kernel"][2], expected.T)
    drawn = "the parameters head/bias, head/kernel are drawn at random"
    assert f"{drawn}, and the tensors (none) are not read" in caplog.text
    assert "pooler/kernel" in arrays
