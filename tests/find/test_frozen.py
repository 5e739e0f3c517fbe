"""Parameters that are not trained get rules, and no optimizer state or gradient is counted."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from unannotated_lm import LM, batch, loss, shapes

import shardlib as sl
from shardlib.finetune import lora
from shardlib.registry import DataSpec
from shardlib_models.transformer import FAMILY
from shardlib_models.transformer_config import TransformerConfig

ADAM = optax.adamw(1e-3)


def adapted(rngs, base=LM, **sizes):
    return lora(base(rngs, **sizes), rank=8, rngs=rngs, targets=("**/up", "**/down"))


def find(make, loss, batch):
    options = {"optimizer": ADAM, "on": "8xh100", "mesh": "fsdp=4,tensor=2"}
    return sl.find_rules(make, loss=loss, batch=batch, wrt=nnx.LoRAParam, **options)


@pytest.mark.mesh
def test_the_base_of_adapters_takes_the_memory_of_its_parameters_alone():
    found = find(functools.partial(adapted, dim=256), loss, shapes(16))
    problem, counted = found.questions.problem, 0
    for number, tensor in enumerate(found.classes.tensors):
        if tensor.copies and not tensor.trained:
            held = dict(problem.memory)[problem.layout_variables[number][((),) * len(tensor.shape)]]
            assert held == 4 * tensor.elements * tensor.copies
            counted += tensor.copies
    assert counted == 19


@pytest.mark.soak
def test_adapters_train_under_found_rules_as_on_one_device():
    make = functools.partial(adapted, dim=256)
    found = find(make, loss, shapes(16))
    options = {"rules": found.rules, "optimizer": ADAM, "wrt": nnx.LoRAParam}
    assert sl.testing.assert_equivalent(make, loss, batch(16), ["fsdp=4,tensor=2"], **options)


@pytest.mark.mesh
def test_a_named_base_and_its_adapters_share_rules():
    config = TransformerConfig(num_layers=2, embed_dim=1024, num_heads=8, mlp_dim=4096)

    def base(rngs):
        return FAMILY.make(config, DataSpec(vocab_size=8192, sequence_length=512), rngs)

    rows = dict.fromkeys(("tokens", "targets"), jax.ShapeDtypeStruct((16, 512), jnp.int32))
    found = find(
        lambda rngs: lora(base(rngs), rank=8, rngs=rngs, targets=("**/mlp/*",)),
        functools.partial(FAMILY.loss, train=True),
        rows,
    )
    assert {"embed", "mlp", "lora_rank"} <= set(dict(found.rules.params))
