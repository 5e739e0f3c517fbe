"""Logits equal those of PyTorch's ResNet 1.5 with the same random weights and statistics."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardlib.registry import DataSpec
from shardlib_models.resnet import DEPTHS, ResNetConfig, make

pytestmark = pytest.mark.mesh

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def conv_norm(state, ours, theirs):
    norm = f"{theirs}.normalization"
    return {
        f"{ours}/kernel": state[f"{theirs}.convolution.weight"].transpose(2, 3, 1, 0),
        f"{ours}/norm/scale": state[f"{norm}.weight"],
        f"{ours}/norm/bias": state[f"{norm}.bias"],
        f"{ours}/norm/mean": state[f"{norm}.running_mean"],
        f"{ours}/norm/var": state[f"{norm}.running_var"],
    }


def convert(state, depth):
    found = conv_norm(state, "stem", "resnet.embedder.embedder")
    found["head/kernel"] = state["classifier.1.weight"].T
    found["head/bias"] = state["classifier.1.bias"]
    block = 0
    for stage, count in enumerate(DEPTHS[depth]):
        for i in range(count):
            theirs = f"resnet.encoder.stages.{stage}.layers.{i}"
            for j in range(3 if depth >= 50 else 2):
                found |= conv_norm(state, f"blocks/{block}/branch/{j}", f"{theirs}.layer.{j}")
            if f"{theirs}.shortcut.convolution.weight" in state:
                found |= conv_norm(state, f"blocks/{block}/shortcut", f"{theirs}.shortcut")
            block += 1
    return found


@pytest.mark.parametrize("depth", [18, 50])
def test_logits(depth):
    torch.manual_seed(0)
    width = 4
    bottleneck = depth >= 50
    oracle = transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            embedding_size=width,
            hidden_sizes=[width * 2**i * (4 if bottleneck else 1) for i in range(4)],
            depths=list(DEPTHS[depth]),
            layer_type="bottleneck" if bottleneck else "basic",
            num_labels=7,
        )
    )
    oracle.eval()
    with torch.no_grad():
        for name, tensor in oracle.state_dict().items():
            if "normalization" in name and tensor.is_floating_point():
                tensor.copy_(0.5 + torch.rand(tensor.shape))
    images = np.random.default_rng(0).normal(size=(2, 3, 63, 64)).astype(np.float32)
    with torch.no_grad():
        expected = oracle(torch.from_numpy(images)).logits.numpy()

    data = DataSpec(num_classes=7, image_shape=(63, 64, 3))
    config = ResNetConfig(depth=depth, width=width)
    model = nnx.eval_shape(lambda: make(config, data, nnx.Rngs(0)))
    model.eval()
    graphdef, state = nnx.split(model)
    found = convert({k: v.numpy() for k, v in oracle.state_dict().items()}, depth)
    paths = {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
    assert found.keys() == paths.keys()
    for path, variable in paths.items():
        assert found[path].shape == variable.get_value().shape, path
        variable.set_value(jnp.asarray(found[path]))
    forward = jax.jit(lambda state, images: nnx.merge(graphdef, state)(images))
    actual = forward(state, jnp.asarray(images.transpose(0, 2, 3, 1)))
    scale = np.abs(expected).max()
    np.testing.assert_allclose(actual, expected, atol=1e-4 * scale)
