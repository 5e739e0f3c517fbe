"""Faults of sharding, planted: what is whole, gathered or padded."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from planted import (
    EMBED,
    ROWS,
    array,
    compiled,
    descend,
    layer,
    line_of,
    make_mesh,
    mean_square,
    place,
    weights,
)

from shardlib.explain.analysis.params import ParamsReport, Row
from shardlib.explain.hlo.text import parse
from shardlib.explain.lint import Finding, Subject, lint
from shardlib.explain.lint.subject import spec_of_shapes, spec_of_text
from shardlib.hardware import parse_cluster

MESH = make_mesh(fsdp=4, tensor=2)
VOCAB = 4096


def loss(params, x):
    return mean_square(MESH, params, x)


def batch(mesh=MESH, *spec):
    return array(mesh, (ROWS, EMBED), *spec)


def test_a_leaf_that_is_whole_among_leaves_that_are_cut():
    def with_gate(params, x):
        return mean_square(MESH, {k: params[k] for k in ("up", "down")}, x) + params["gate"].mean()

    params = {**weights(MESH), "gate": array(MESH, (EMBED, EMBED))}
    (found,) = lint(compiled(descend(with_gate), params, batch(MESH, "fsdp")))
    assert str(found).startswith(f"{found.source}: SL101 params/gate float32[512,512] is")
    assert found.fix == "Shard its dim 0 of 512 over 'fsdp'."
    assert (found.place, found.bytes) == ("params/gate", 2**20 * 3 / 4)
    assert found.source == line_of(descend, "step")


def row(path, shape, *, copies, fell_back, asked_for=False):
    size = 4 * shape[0] * shape[1]
    refused = ("heads: not tensor: 3 is not divisible by 2",) if fell_back else ()
    return Row(
        "params", path, shape, "float32", ("embed", "heads"), "metadata", (), refused, ("stage",),
        "", size, size, copies, asked_for, fell_back,
    )  # fmt: skip


def test_a_leaf_that_its_rule_wants_to_cut():
    rows = (
        row("layers/query", (4096, 3), copies=8, fell_back=True),
        # The mesh has no axis for it, which is chosen; and what is small.
        row("layers/key", (4096, 4096), copies=8, fell_back=False),
        row("layers/norm", (4, 3), copies=8, fell_back=True),
    )
    report = ParamsReport({"fsdp": 4, "tensor": 2}, rows, (), ())
    subject = Subject("", {"fsdp": 4, "tensor": 2}, state=report)
    subject = dataclasses.replace(
        subject, limits=dataclasses.replace(subject.limits, replicated_bytes=2**15)
    )
    (found,) = lint(subject)
    assert str(found).startswith("SL101 layers/query (48.0 KiB on each device) is more")


def test_a_batch_that_no_axis_splits():
    subject = compiled(descend(loss), weights(MESH), batch())
    found = next(finding for finding in lint(subject) if finding.place == "batch/0")
    assert found == Finding(
        "SL102",
        "batch/0",
        "batch/0 float32[2048,512] is replicated on all 4 devices along fsdp: they all compute the "
        "same.",
        "Shard its dim 0 of 2048 over fsdp.",
        subject.step_source,
        bytes=ROWS * EMBED * 4 * 3 / 4,
    )
    assert subject.step_source == line_of(descend, "step")


def test_the_batch_is_found_behind_an_optimizers_state():
    def step(params, opt_state, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        moved = jax.tree.map(lambda m, g: 0.9 * m + g, opt_state, gradients)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, moved), moved, value

    options = {"donate_argnums": (0, 1), "out_shardings": None}
    whole = lint(compiled(step, weights(MESH), weights(MESH), batch(), **options))
    assert [finding.place for finding in whole if finding.code == "SL102"] == ["batch"]
    assert lint(compiled(step, weights(MESH), weights(MESH), batch(MESH, "fsdp"), **options)) == ()


def test_a_key_is_no_batch():
    def noisy(params, rng):
        x = jax.random.normal(jax.random.wrap_key_data(rng), (ROWS, EMBED))
        return loss(params, jax.lax.with_sharding_constraint(x, place(MESH, "fsdp")))

    rng = array(MESH, (2,), dtype="uint32")
    assert lint(compiled(noisy, weights(MESH), rng, donate_argnums=(), out_shardings=None)) == ()


@pytest.mark.parametrize(("spec", "codes"), [((), ["SL102"]), (("dp",), []), ((None, "dp"), [])])
def test_a_batch_that_an_axis_of_another_name_should_split(spec, codes):
    mesh = make_mesh(dp=2, tp=4)
    params = {"up": array(mesh, (EMBED, 1024), None, "tp")}
    subject = compiled(
        lambda params, x: jnp.sum(x @ params["up"]), params, batch(mesh, *spec),
        donate_argnums=(), out_shardings=None,
    )  # fmt: skip
    found = lint(subject)
    assert [finding.code for finding in found] == codes
    if found:
        assert found[0].message == (
            "x float32[2048,512] is replicated on all 2 devices along dp: they all compute the "
            "same."
        )


def gathered_layer(mesh, h, matrices):
    h = jax.lax.with_sharding_constraint(h, place(mesh))  # planted
    return layer(mesh, h, matrices)


def test_rows_that_are_gathered_inside_of_the_layers():
    def gathered(params, x):
        return mean_square(MESH, params, x, gathered_layer)

    findings = lint(compiled(descend(gathered), weights(MESH), batch(MESH, "fsdp")))
    assert {finding.code for finding in findings} == {"SL102"}
    found = next(f for f in findings if f.source == line_of(gathered_layer, "planted"))
    assert found.place == ("sharding_constraint (forward) in test_lint_sharding.py:gathered_layer")
    assert found.message == (
        "f32[2048,512] (4.0 MiB) is gathered over fsdp, 4 times a step: every device holds all "
        "the rows that the mesh splits."
    )
    assert found.fix == "Constrain the activation so that its batch dim stays sharded over fsdp."


def cut(*spec):
    return functools.partial(jax.lax.with_sharding_constraint, shardings=place(MESH, *spec))


def classify(params, tokens, targets):
    h = cut("fsdp")(params["table"][tokens])
    logits = cut("fsdp")(cut("fsdp", "tensor")(h @ params["head"]))  # planted
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], 1))


def classify_whole(params, tokens, targets):
    h = cut("fsdp")(params["table"][tokens])
    logits = cut("fsdp")(h @ params["head"])  # planted
    rows = jax.nn.log_softmax(logits)  # read
    return -jnp.mean(jnp.take_along_axis(rows, targets[:, None], 1))


@pytest.mark.parametrize(
    ("planted", "what"),
    [
        (classify, "logits, f32[512,4096] (8.0 MiB), are gathered over tensor"),
        (classify_whole, "the weights of the logits, f32[512,4096] (8.0 MiB), are gathered over "
         "tensor"),
    ],
)  # fmt: skip
def test_logits_that_are_whole(planted, what):
    params = {
        "table": array(MESH, (VOCAB, EMBED), "tensor"),
        "head": array(MESH, (EMBED, VOCAB), "fsdp", "tensor"),
    }
    tokens = array(MESH, (ROWS,), "fsdp", dtype="int32")
    (found,) = lint(compiled(descend(planted), params, tokens, tokens))
    lines = [line_of(planted, "planted")]
    if planted is classify_whole:
        # A later JAX gives a weight's gather no line: then it is that of what reads it.
        lines.append(line_of(planted, "read"))
    assert found.source in lines
    assert str(found).startswith(f"{found.source}: SL103 {what}: each device holds logits of")


def reshaped(params, x):
    h = jax.lax.with_sharding_constraint(x @ params["up"][0], place(MESH, "fsdp", "tensor"))
    h = h.reshape(64, ROWS // 64, 1024)  # planted
    h = jax.lax.with_sharding_constraint(h, place(MESH, None, ("tensor", "fsdp"), None))
    return jnp.sum(jnp.sin(h))


@pytest.mark.parametrize("shardy", [True, False])
def test_what_the_partitioner_rematerializes(shardy):
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", shardy)
    params, x = {"up": weights(MESH)["up"]}, batch(MESH, "fsdp")
    try:
        subject = compiled(reshaped, params, x, donate_argnums=(), out_shardings=None)
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)
    found = [finding for finding in lint(subject) if finding.code == "SL104"]
    assert str(found[0]).startswith(f"{line_of(reshaped, 'planted')}: SL104 f32[16,32,512] on")
    assert "gathered to 8.0 MiB and sharded again" in found[0].message
    assert (len(found), found[0].place) == (1, "reshape in test_lint_sharding.py:reshaped")


# Cut from a program for a v5e: scores of heads of 64, and a projection of dims that fit.
TPU = """HloModule jit_step, is_scheduled=true, num_partitions=8, \
entry_computation_layout={(bf16[4,512,8,64]{3,1,2,0:T(8,128)(2,1)})->f32[]}

ENTRY %main (p: bf16[4,512,8,64]) -> f32[] {
  %q = bf16[4,8,512,64]{3,2,1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="q"}
  %k = bf16[4,512,8,64]{3,1,2,0:T(8,128)(2,1)} parameter(1), metadata={op_name="k"}
  %x = bf16[4,512,1024]{2,1,0:T(8,128)(2,1)} parameter(2), metadata={op_name="x"}
  %w = bf16[1024,1024,1]{1,0,2:T(8,128)(2,1)} parameter(3), metadata={op_name="w"}
  %scores = f32[4,8,512,512]{3,2,1,0:T(8,128)} convolution(%q, %k), \
window={size=4x8 stride=3x7 lhs_dilate=4x8}, dim_labels=01bf_0o1i->01bf, \
metadata={op_name="jit(step)/jvp()/bhtd,bshd->bhts/dot_general" source_file="model.py" \
source_line=41}
  %y = bf16[4,512,1024]{2,1,0:T(8,128)(2,1)} convolution(%x, %w), window={size=1}, \
dim_labels=0bf_io0->0bf, metadata={op_name="jit(step)/jvp()/dot_general" source_file="model.py" \
source_line=50}
  %x4 = bf16[4,512,1024,1]{2,1,3,0:T(8,128)(2,1)} parameter(4)
  %w4 = bf16[1024,16,64,1]{0,2,1,3:T(8,128)(2,1)} parameter(5)
  %heads = bf16[4,512,16,64]{3,1,2,0:T(8,128)(2,1)} convolution(%x4, %w4), \
window={size=1x16 pad=0_0x15_15 rhs_reversal=0x1}, dim_labels=0bf1_i1o0->0b1f, \
metadata={op_name="jit(step)/jvp()/dot_general" source_file="model.py" source_line=52}
  ROOT %loss = f32[]{:T(128)} custom-call(%scores, %y, %heads), custom_call_target="sum"
}
"""


def test_heads_that_a_tpu_pads():
    (found,) = lint(Subject(TPU, {"fsdp": 8}))
    # Of 2 x 512 x 512 x 64 FLOPs for each of 32 heads as many again; the two projections, whose 16
    # heads of 64 are 1024 columns, have 2 x 2048 x 1024 x 1024 each.
    assert str(found).startswith("model.py:41: SL105 a dim of 64 is padded to 128 in 1 matmul")
    assert "11% of the step's matmul FLOPs" in found.message
    assert found.place == "bhtd,bshd->bhts/dot_general (forward) in model.py"
    assert lint(Subject(TPU.replace("64]", "128]"), {"fsdp": 8})) == ()


def test_sizes_that_are_not_the_users_are_no_fault():
    scores = TPU.index("jit(step)/jvp()/bhtd")
    update = TPU[:scores] + TPU[scores:].replace("jvp()/bhtd", "bhtd", 1)
    assert lint(Subject(update, {"fsdp": 8})) == ()
    channels = TPU.replace("bhtd,bshd->bhts/dot_general", "conv_general_dilated")
    assert lint(Subject(channels, {"fsdp": 8})) == ()
    assert lint(Subject(TPU.replace("model.py", optax.__file__), {"fsdp": 8})) == ()


def test_a_vocabulary_that_tensor_cores_cannot_read():
    params = {"head": array(MESH, (EMBED, 50258), None, "tensor")}
    subject = Subject(
        "", {"fsdp": 4, "tensor": 2}, parse_cluster("8xh100"), arguments=(params,)
    )  # fmt: skip
    (found,) = lint(subject)
    assert str(found).startswith("SL105 argument/0/head has a dim 1 of 50258 over tensor=2:")
    assert "25129 on a device" in found.message
    assert "49.1 MiB" in found.message
    assert found.fix == "Pad it to 50272."


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("{replicated}", ((), ())),
        ("{devices=[4,1,2]<=[8] last_tile_dim_replicate}", (("fsdp",), ())),
        ("{devices=[2,4]<=[4,2]T(1,0)}", (("tensor",), ("fsdp",))),
        ("{devices=[8,1]<=[8]}", (("fsdp", "tensor"), ())),
        ("{devices=[2,4]0,2,4,6,1,3,5,7}", (("tensor",), ("fsdp",))),
        ("{devices=[4,2]0,1,2,3,4,5,7,6}", None),
        ("{something new}", None),
    ],
)
def test_the_sharding_of_an_argument_in_the_text(text, spec):
    assert spec_of_text(text, 2, {"fsdp": 4, "tensor": 2}) == spec


def test_the_sharding_of_an_argument_by_its_parts():
    mesh = {"data": 2, "fsdp": 4, "tensor": 2}
    assert spec_of_shapes((16, 8), (2, 8), mesh) is None  # over fsdp and data, or tensor
    assert spec_of_shapes((16, 8), (1, 8), mesh) == (("data", "fsdp", "tensor"), ())
    assert spec_of_shapes((16, 8), (4, 8), {"data": 1, "fsdp": 4, "tensor": 2}) == (("fsdp",), ())
    assert spec_of_shapes((16,), (4, 4), mesh) is None


def test_arguments_without_a_sharding_are_read_from_the_text():
    subject = compiled(descend(loss), weights(MESH), batch(MESH, "fsdp"))
    bare = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), subject.arguments)
    read = dataclasses.replace(subject, arguments=bare)
    assert [leaf.spec for leaf in read.leaves] == [leaf.spec for leaf in subject.leaves]
    assert read.batch_axes == ("fsdp",)
    assert parse(subject.text).entry == subject.module.entry
