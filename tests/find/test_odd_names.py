"""Parts of a model may have any name."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import optax
import pytest

import shardlib as sl

ADAM = optax.adamw(1e-3)
X = jax.ShapeDtypeStruct((64, 512), jnp.float32)


class Net(linen.Module):
    names: tuple[str, str]

    @linen.compact
    def __call__(self, x):
        outs = [
            linen.Dense(512, use_bias=False)(
                jax.nn.gelu(linen.Dense(width, use_bias=False, name=name)(x))
            )
            for width, name in zip((2048, 16), self.names, strict=True)
        ]
        return outs[0] + outs[1]


def squared(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def find(*names, **options):
    options = {"mesh": "fsdp=4,tensor=2", "batch": {"x": X, "y": X}} | options
    make = Net(names)
    return sl.find_rules(make, loss=squared, optimizer=ADAM, on="8xh100", inputs=(X,), **options)


@pytest.mark.mesh
@pytest.mark.parametrize("names", [("mlp.up", "mlp.gate"), ("mlp.1", "mlp.2"), ("a=1", "b:2+c")])
def test_signs_in_a_name_mean_nothing(names):
    plain, found = find("up", "gate"), find(*names)
    assert [p.rank for p in found.prices] == [p.rank for p in plain.prices]
    assert found.traffic == plain.traffic
    with sl.use(found.mesh, sl.rules.from_yaml(sl.rules.to_yaml(found.rules))):
        sl.abstract_state(Net(names), ADAM, inputs=(X,))


def test_a_part_called_batch_is_no_row():
    plain, found = find("up", "gate"), find("batch", "gate")
    assert dict(found.rules.paths)["batch/kernel"][1] == "batch_2"
    assert found.prices[0].rank == plain.prices[0].rank
