"""Models that name their axes get a rule for each name."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.errors import DoesNotFitError
from shardlib.registry import DataSpec
from shardlib_models.transformer import FAMILY
from shardlib_models.transformer_config import TransformerConfig

ADAM = optax.adamw(1e-3)
LOSS = functools.partial(FAMILY.loss, train=True)
BATCH = dict.fromkeys(("tokens", "targets"), jax.ShapeDtypeStruct((16, 512), jnp.int32))


def llama(rngs):
    config = TransformerConfig(
        num_layers=2, embed_dim=4096, num_heads=32, num_kv_heads=8, mlp_dim=14336
    )
    return FAMILY.make(config, DataSpec(vocab_size=8192, sequence_length=512), rngs)


def find(**options):
    options = {"loss": LOSS, "batch": BATCH, "optimizer": ADAM, "on": "8xh100"} | options
    return sl.find_rules(llama, **options)


def cuts(table):
    return {name: "+".join(axes) for name, (axes, *_) in table if axes}


@pytest.mark.mesh
def test_a_llama_gets_megatrons_rules_with_sequence_parallelism():
    """Megatron-LM's cut of heads, MLP and vocabulary, ZeRO-3, and Korthikanti et al. 2022."""
    found = find(mesh="fsdp=4,tensor=2")
    wide = dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), "tensor")
    assert cuts(found.rules.params) == wide | {"embed": "fsdp"}
    of_activations = {"batch": "fsdp", "residual_length": "tensor"}
    assert cuts(found.rules.activations) == wide | of_activations
    assert found.rules.paths == ()
    assert found.rules.names is None
    assert found.solution.gap <= 1e-3
    assert {price.name.partition(",")[0] for price in found.prices} >= {"standard", "sequence"}


@pytest.mark.soak
@pytest.mark.parametrize("mesh", ["fsdp=4,tensor=2", "data=2,fsdp=2,tensor=2"])
def test_they_send_no_more_than_standard(mesh):
    def sent(rules):
        with sl.use(sl.make_mesh(mesh), rules):
            state = sl.abstract_state(llama, ADAM)
            report = sl.explain(sl.make_train_step(LOSS, precision="bf16"), state, BATCH)
        return sum(c.folded_bytes for c in report.collectives)

    assert sent(find(mesh=mesh).rules) <= 1.02 * sent(sl.rules.STANDARD)


@pytest.mark.mesh
def test_one_mesh_axis_does_not_cut_heads_and_their_dims():
    """`attend` would find its heads whole wherever the rule of `head_dim` comes first."""
    problem = find(mesh="fsdp=2,tensor=4").questions.problem
    rules = {"heads": ("tensor",)}
    assert problem.solution(60.0, rules).rules["head_dim"] == ()
    with pytest.raises(DoesNotFitError):
        problem.solution(60.0, rules | {"head_dim": ("tensor",)})


def test_rows_that_a_loss_constrains_to_be_whole_are_whole():
    """As the keys of a loss that compares all rows with each other."""

    class Tower(nnx.Module):
        def __init__(self, rngs):
            kernel = nnx.with_partitioning(nnx.initializers.normal(), ("embed", "mlp"))
            self.up = nnx.Linear(256, 256, kernel_init=kernel, rngs=rngs)

        def __call__(self, x):
            return sl.constrain(self.up(x), "batch", None)

    def contrast(model, x):
        rows = model(x)
        scores = rows @ sl.constrain(rows, None, None).T
        return optax.softmax_cross_entropy_with_integer_labels(scores, jnp.arange(len(x))).mean()

    rows = jax.ShapeDtypeStruct((512, 256), jnp.float32)
    found = sl.find_rules(
        Tower, loss=contrast, batch=rows, optimizer=ADAM, on="8xh100", mesh="fsdp=4,tensor=2"
    )
    assert cuts(found.rules.activations)["batch"] == "fsdp"
