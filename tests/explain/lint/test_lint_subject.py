"""What the checks look at: arguments, where they come from, and what is not known."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import pytest
from planted import EMBED, ROWS, array, compiled, descend, make_mesh, mean_square, weights

from shardlib.explain.aot.compile import compile_step
from shardlib.explain.hlo.origins import HloValue, Values
from shardlib.explain.hlo.text import parse
from shardlib.explain.lint import Finding, Subject, lint

MESH = make_mesh(fsdp=4, tensor=2)
X = array(MESH, (ROWS, EMBED), "fsdp")


def loss(params, x):
    return mean_square(MESH, params, x)


def test_a_step_compiled_ahead_of_time_is_a_subject():
    step = jax.jit(descend(loss), donate_argnums=0)
    made = Subject.of(compile_step(step, (weights(MESH), X), keep=False))
    assert made.mesh == {"fsdp": 4, "tensor": 2}
    assert {leaf.path: leaf.is_state for leaf in made.leaves} == {
        "params/down": True, "params/up": True, "batch/0": False,
    }  # fmt: skip
    assert [leaf.number for leaf in made.leaves] == [0, 1, 2]
    assert (made.batch_axes, made.platform) == (("fsdp",), "cpu")
    assert lint(made) == ()


def test_a_step_with_a_number_in_its_state():
    def step(params, x):
        return jax.tree.map(lambda p: p - params["lr"] * jnp.mean(x), params)

    made = compiled(step, {"lr": 0.1, "up": weights(MESH)["up"]}, X, out_shardings=None)
    assert [(leaf.path, leaf.donated, leaf.number) for leaf in made.leaves] == [
        ("params/lr", True, 0), ("params/up", True, 1), ("x", False, 2),
    ]  # fmt: skip
    assert lint(made) == ()


@pytest.mark.parametrize(
    ("names", "states"),
    [
        ({"params/w": "params", "opt_state/mu": "optimizer", "batch": "batch"}, "110"),
        ({"batch": "batch", "params/w": "params"}, "01"),
        # What lies beside what has a name is as that is.
        ({"state/params/w": "params", "state/rng": "other", "data/x": "batch", "data/m": "other"},
         "1100"),
        ({"params/w": "params", "ema/w": "other", "x": "batch"}, "110"),
        # The first is the state and the others are the batch, where no name says it.
        ({"theta/w": "other", "data/0": "other", "rng": "other"}, "100"),
        ({"x": "batch", "theta/w": "other"}, "01"),
        ({"params/w": "params", "rows": "other"}, "10"),
    ],
)  # fmt: skip
def test_what_is_state_and_what_is_batch(names, states):
    owners = {}
    for path in names:
        owners.setdefault(path.partition("/")[0], {})[path.partition("/")[2]] = X
    arguments = tuple(leaves[""] if "" in leaves else nested(leaves) for leaves in owners.values())
    made = Subject("", dict(MESH.shape), arguments=arguments, names=names)
    assert [leaf.path for leaf in made.leaves] == list(names)
    assert "".join(str(int(leaf.is_state)) for leaf in made.leaves) == states


def nested(leaves):
    """Arrays in an order that JAX keeps, with the paths that `names` have."""
    return collections.OrderedDict(leaves)


def test_findings_are_data():
    found = Finding("SL503", "while", "a loop", "count it", "model.py:3", "jit(step)/while", 12.0)
    assert found.to_dict() == {
        "code": "SL503", "place": "while", "message": "a loop", "fix": "count it",
        "source": "model.py:3", "op_name": "jit(step)/while", "bytes": 12.0,
        "model_path": "", "phase": "",
        "title": "the trip count of a loop is unknown",
    }  # fmt: skip
    named = dataclasses.replace(found, model_path="layers[*]/mlp", phase="forward")
    assert str(named) == "model.py:3: SL503 in layers[*]/mlp (forward): a loop\n  count it"


# A loop over a stack that is gathered slice by slice; its tuple is taken apart twice, as on TPUs.
LOOP = """HloModule jit_step, num_partitions=2

%body (t: (s32[], f32[4,8], f32[8], f32[8])) -> (s32[], f32[4,8], f32[8], f32[8]) {
  %t = (s32[], f32[4,8]{1,0}, f32[8]{0}, f32[8]{0}) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %stack = f32[4,8]{1,0} get-tuple-element(%t), index=1
  %shared = f32[8]{0} get-tuple-element(%t), index=2
  %h = f32[8]{0} get-tuple-element(%t), index=3
  %again = (f32[8]{0}, f32[8]{0}) tuple(%shared, %h)
  %kept = f32[8]{0} get-tuple-element(%again), index=0
  %carried = f32[8]{0} get-tuple-element(%again), index=1
  %copied = f32[8]{0} copy(%kept)
  %both = f32[8]{0} add(%copied, %carried)
  %same = f32[8]{0} multiply(%copied, %kept)
  %drawn = f32[8]{0} rng(%same, %same), distribution=rng_uniform
  ROOT %r = (s32[], f32[4,8]{1,0}, f32[8]{0}, f32[8]{0}) tuple(%n, %stack, %copied, %both)
}

ENTRY %main (p: f32[4,8], q: f32[8]) -> f32[8] {
  %p = f32[4,8]{1,0} parameter(0)
  %q = f32[8]{0} parameter(1)
  %half = bf16[8]{0} convert(%q)
  %zero = s32[] constant(0)
  %init = (s32[], f32[4,8]{1,0}, f32[8]{0}, f32[8]{0}) tuple(%zero, %p, %q, %q)
  %loop = (s32[], f32[4,8]{1,0}, f32[8]{0}, f32[8]{0}) while(%init), condition=%c, body=%body
  %shared.1 = f32[8]{0} get-tuple-element(%loop), index=2
  ROOT %out = f32[8]{0} get-tuple-element(%loop), index=3
}
"""


def test_where_values_come_from():
    values = Values(parse(LOOP))
    loop = values.module.instruction("main", "loop")
    kept = values.unchanged(loop)
    assert kept == {0, 1, 2}
    invariant = {
        name: values.is_invariant(kept, HloValue("body", name))
        for name in ("copied", "both", "same", "drawn", "stack")
    }
    assert invariant == {
        "copied": True, "both": False, "same": True, "drawn": False, "stack": True,
    }  # fmt: skip

    def origins(where, name):
        found = values.origins(HloValue(where, name))
        return {o.opcode if o.argument is None else o.argument for o in found}

    assert origins("main", "half") == {1}
    assert origins("main", "shared.1") == {1}
    assert origins("body", "kept") == {1}
    assert origins("main", "out") == {1, "add"}
    assert origins("main", "nowhere") == {"unknown"}
