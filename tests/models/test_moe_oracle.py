"""Results and gradients equal those of PyTorch's Mixtral with the same random weights."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")


import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardlib_models.moe import MoE, MoEConfig, losses

pytestmark = pytest.mark.mesh

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")

BATCH, LENGTH, EMBED, MLP, EXPERTS, K = 2, 9, 16, 24, 6, 2

# Sums of at most 24 products of float32 numbers of size about 1.
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def oracle():
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=EMBED,
        intermediate_size=MLP,
        num_local_experts=EXPERTS,
        num_experts_per_tok=K,
        router_jitter_noise=0.0,
    )
    config._experts_implementation = "eager"
    block = mixtral.MixtralSparseMoeBlock(config)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape))
    return block.eval()


@pytest.fixture(scope="module")
def layer(oracle):
    """The same weights here."""
    config = MoEConfig(num_experts=EXPERTS, experts_per_token=K)
    model = MoE(config, EMBED, MLP, rngs=nnx.Rngs(0))
    weights = {name: p.detach().numpy() for name, p in oracle.named_parameters()}
    gate, up = np.split(weights["experts.gate_up_proj"], 2, axis=1)
    model.router.kernel.set_value(jnp.asarray(weights["gate.weight"].T))
    model.experts.gate.set_value(jnp.asarray(gate.transpose(0, 2, 1)))
    model.experts.up.set_value(jnp.asarray(up.transpose(0, 2, 1)))
    model.experts.down.set_value(jnp.asarray(weights["experts.down_proj"].transpose(0, 2, 1)))
    return model


@pytest.fixture(scope="module")
def inputs():
    return np.random.default_rng(0).normal(size=(2, BATCH, LENGTH, EMBED)).astype(np.float32)


def close(found, expected):
    limit = TOLERANCE * max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(found, expected, rtol=0, atol=limit)


def test_results_and_gradients(oracle, layer, inputs):
    x, target = inputs
    tensor = torch.tensor(x, requires_grad=True)
    expected = oracle(tensor)
    oracle.zero_grad()
    (expected * torch.tensor(target)).sum().backward()

    def value(model, x):
        y, _ = model(x)
        return jnp.sum(y * target), y

    grad = nnx.grad(value, argnums=(0, 1), has_aux=True)
    (by_weights, by_x), y = nnx.jit(grad)(layer, jnp.asarray(x))
    assert np.abs(y).max() > 1
    close(y, expected.detach().numpy())
    close(by_x, tensor.grad.numpy())
    close(by_weights.router.kernel[...].T, oracle.gate.weight.grad.numpy())
    gate_up = oracle.experts.gate_up_proj.grad.numpy()
    gate, up = by_weights.experts.gate[...], by_weights.experts.up[...]
    close(np.concatenate([gate, up], axis=2).transpose(0, 2, 1), gate_up)
    down = by_weights.experts.down[...].transpose(0, 2, 1)
    close(down, oracle.experts.down_proj.grad.numpy())


def test_load_balancing_loss(oracle, layer, inputs):
    x, mask = inputs[0], np.random.default_rng(1).random((BATCH, LENGTH)) < 0.7
    with torch.no_grad():
        logits = oracle.gate(torch.tensor(x))[0]
        expected = mixtral.load_balancing_loss_func(
            (logits,), EXPERTS, K, torch.tensor(mask, dtype=torch.int64)
        )
    stats = layer(jnp.asarray(x), jnp.asarray(mask))[1]
    _, metrics = losses(stats, layer.config, 1)
    # There the shares of the experts add up to K, here to 1.
    assert K * float(metrics["router_balance"].value) == pytest.approx(float(expected), rel=1e-6)
