"""Attention that is traced as one operation is cut as its region is in a run."""

import jax
import jax.numpy as jnp
import pytest

import shardlib as sl
from shardlib.errors import PartitionError
from shardlib.mesh import abstract_mesh
from shardlib.nn.attention import attend
from shardlib.nn.attention.as_one import attention_as_one
from shardlib.partitioner import ValueLayout, analyze, trace
from shardlib.sharding.shared_rows import OPAQUE

RULES = sl.rules.STANDARD


def attention_step(mesh, query_dims, *, rules=RULES, kv_length=512, dtype=jnp.bfloat16):
    """Returns the step of attention on a mesh where query, keys and values have one layout."""
    query, key = (jax.ShapeDtypeStruct((4, length, 4, 16), dtype) for length in (512, kv_length))
    with attention_as_one("gpu", "rows"):
        traced = trace(lambda q, k: attend(q, k, k, causal=False), (query, key))
    devices = mesh.count("=") * 2
    with sl.use(abstract_mesh(mesh, devices), rules) as scope:
        inputs = [ValueLayout(query_dims)] * 2
        program = analyze(traced, scope, inputs, lambda _: [None], ("fsdp",)).program
    (step,) = (one for one in program.walk() if one.operation.name == OPAQUE)
    return step


def layouts(*arguments, **options):
    """Returns the layouts in which attention takes the query and the keys, and its result's, and
    the bytes that it moves; arguments are as in `attention_step`."""
    step = attention_step(*arguments, **options)
    return [one.dims for one in (*step.operands[:2], step.results[0])], step.moved_bytes


WHOLE = ((),) * 4


def test_positions_over_tensor_are_not_free():
    """No device has the keys of others without a move."""
    taken, moved = layouts("tensor=2", ((), ("tensor",), (), ()))
    assert taken == [((), (), ("tensor",), ())] * 3
    assert moved > 0


@pytest.mark.parametrize("kv_length", [512, 256], ids=["row", "other length"])
def test_only_rows_to_themselves_are_shared(kv_length):
    dims = (("fsdp",), ("context",), (), ())
    taken, moved = layouts("fsdp=2,context=2", dims, kv_length=kv_length)
    shared = ("context",) if kv_length == 512 else ()
    assert taken == [(("fsdp",), shared, (), ())] * 3
    assert (moved > 0) == (kv_length == 256)


def test_heads_follow_the_rules_and_not_the_operands():
    dims = ((), (), ("tensor",), ())
    whole = RULES.override(activations={"heads": None, "kv_heads": None})
    assert layouts("tensor=2", dims, rules=whole)[0] == [WHOLE] * 3
    assert layouts("tensor=2", WHOLE)[0] == [dims] * 3


def test_keys_of_another_length_count():
    """Each query meets all keys: two products of two FLOPs for each pair of numbers."""
    step = attention_step("tensor=2", WHOLE, kv_length=256)
    assert step.factors.flops == 2 * 4 * 512 * 256 * 4 * (16 + 16)


def test_the_gradient_of_attention_with_sinks_is_cut():
    query = jax.ShapeDtypeStruct((4, 512, 4, 16), jnp.bfloat16)
    sinks = jax.ShapeDtypeStruct((4,), jnp.float32)

    def total(q, sinks):
        return jnp.sum(attend(q, q, q, sinks=sinks).astype(jnp.float32))

    with attention_as_one("gpu", "rows"):
        traced = trace(jax.grad(total, (0, 1)), (query, sinks))
    rows = ValueLayout((("fsdp",), (), (), ()))
    with sl.use(abstract_mesh("fsdp=2", 2), RULES) as scope:
        inputs = [rows, ValueLayout(((),))]
        program = analyze(traced, scope, inputs, lambda _: [None, None], ("fsdp",)).program
    steps = [one for one in program.walk() if one.operation.name == OPAQUE]
    assert [one.is_whole for one in steps] == [False, False]
    assert all(one.operands[0].dims == rows.dims for one in steps)


def test_a_region_of_some_axes_is_left_to_xla_as_in_a_run():
    """A kernel of a GPU runs in 16 bits alone, and over the whole mesh."""
    whole = RULES.override(activations={"heads": None, "kv_heads": None})
    dims = (("fsdp",), (), (), ())
    for mesh, lies in (("fsdp=2,tensor=2", dims), ("tensor=2", WHOLE)):
        assert layouts(mesh, lies, rules=whole)[0] == [lies] * 3
    options = {"rules": whole, "dtype": jnp.float32}
    with pytest.raises(PartitionError, match="a region that is not manual over tensor"):
        layouts("fsdp=2,tensor=2", dims, **options)
    assert layouts("tensor=2", WHOLE, **options)[0] == [WHOLE] * 3
