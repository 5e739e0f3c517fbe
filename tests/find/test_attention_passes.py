"""Attention as one operation is counted in each pass that a remat policy makes it run."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from unannotated_lm import LM, Block, loss, shapes

import shardlib as sl
from shardlib.cost.layout import Layout
from shardlib.find.lowered import lowered_tally
from shardlib.nn import remat
from shardlib.nn.attention import attend
from shardlib.nn.attention.as_one import attention_as_one, attention_is_met
from shardlib.plan.workloads.tracing import trace_workload
from shardlib.registry import DataSpec
from shardlib_models.transformer import FAMILY
from shardlib_models.transformer_config import TransformerConfig

ROWS, LENGTH, WIDTH, LAYERS = 8, 512, 256, 2
PRODUCTS = 4.0 * ROWS * LENGTH**2 * WIDTH * LAYERS
"""FLOPs of the scores and the mixed values of all pairs, forward."""


def costs(policy):
    config = TransformerConfig(
        num_layers=LAYERS, embed_dim=WIDTH, num_heads=2, num_kv_heads=2, mlp_dim=512, remat=policy
    )
    make = functools.partial(FAMILY.make, config, DataSpec(vocab_size=512, sequence_length=LENGTH))
    options = {"precision": "bf16", "platform": "gpu"}
    of_model, batch = functools.partial(FAMILY.loss, train=True), shapes(ROWS, LENGTH)
    traced = trace_workload(make, optax.sgd(1e-3), of_model, batch, **options)
    return traced.costs(Layout(), "gpu")[0]


def by_pass(tally):
    found = dict.fromkeys(("forward", "recompute", "backward"), 0.0)
    for (during, _), flops in tally.attended.items():
        found[during] += flops
    return found


@pytest.mark.parametrize(
    "policy", ["none", "dots", "full", "save:attended", "save:query,key,value"]
)
def test_attention_runs_forward_again_unless_its_result_is_kept(policy):
    again = PRODUCTS if policy in ("full", "save:query,key,value") else 0.0
    expected = {"forward": PRODUCTS, "recompute": again, "backward": 2 * PRODUCTS}
    assert by_pass(costs(policy)) == expected


class Remade(Block):
    """A block whose attention alone is under a remat policy."""

    def __init__(self, policy, rngs):
        super().__init__(WIDTH, 2, rngs)
        self.policy = policy

    def __call__(self, x):
        def attended(x):
            y = self.norms[0](x).astype(jnp.bfloat16)
            parts = (part(y) for part in (self.query, self.key, self.value))
            query, key, value = (p.reshape(*p.shape[:2], self.heads, -1) for p in parts)
            return attend(query, key, value).reshape(*x.shape)

        return x + self.out(remat.apply(self.policy, attended)(x))


class Plain(LM):
    """It names no axes."""

    def __init__(self, rngs, policy):
        super().__init__(rngs, dim=WIDTH)
        self.blocks = nnx.List([Remade(policy, rngs) for _ in range(LAYERS)])


@pytest.mark.parametrize("policy", ["none", "full", "save:attended"])
def test_a_program_that_shardlib_partitions_runs_it_as_often(policy):
    make = functools.partial(Plain, policy=policy)
    with attention_as_one("gpu", "regions"):
        workload = trace_workload(
            make,
            optax.sgd(1e-3),
            loss,
            shapes(ROWS, LENGTH),
            precision="bf16",
            platform="gpu",
            rules=sl.rules.FSDP,
        )
    tally = lowered_tally(workload.step, Layout(fsdp=2), "gpu")
    again = PRODUCTS / 2 if policy == "full" else 0.0
    expected = {"forward": PRODUCTS / 2, "recompute": again, "backward": PRODUCTS}
    assert by_pass(tally) == expected


def test_a_compiled_function_of_the_user_is_met_in_each_search():
    """JAX keeps what it has traced within one search apart from others."""
    function = jax.jit(lambda x: attend(x, x, x))
    x = jax.ShapeDtypeStruct((2, 128, 4, 16), jnp.bfloat16)
    for _ in range(2):
        with attention_as_one("gpu", "regions"):
            jax.eval_shape(lambda x: function(x), x)
            assert attention_is_met()
