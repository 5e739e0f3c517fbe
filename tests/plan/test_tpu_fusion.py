"""What compilers for TPUs write to memory, beside what others write."""

import jax
import jax.numpy as jnp
import pytest

from shardlib.cost.traced.fusion import fusion
from shardlib.cost.traced.tiles import least_padding, operand_padding
from shardlib.jaxprs import flatten

ROWS, WIDTH, HIDDEN = 8, 16, 64


def written(function, *shapes, platform):
    """Returns the primitives whose results of 8 x 64 elements are written for later ones, in
    order."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    program = flatten(jax.make_jaxpr(function)(*arguments).jaxpr)
    groups = fusion(program, platform)
    read = {value for group in groups for value in group.reads}
    return [
        program.operations[group.end].name
        for group in groups
        for value in group.writes
        if value in read and value.aval.shape == (ROWS, HIDDEN)
    ]


def mlp(x, up, down):
    return jnp.sum((jnp.sin(x @ up) @ down) ** 2)


SHAPES = (ROWS, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH)


def test_products_write_what_elementwise_operations_make_of_their_result():
    assert written(mlp, *SHAPES, platform="gpu") == ["dot_general", "sin"]
    assert written(mlp, *SHAPES, platform="tpu") == ["sin"]


def test_products_compute_elementwise_operands():
    """The backward pass computes sine and cosine again, and multiplies by the cosine before it
    writes the gradient of the hidden vectors."""
    gradient = jax.grad(mlp, (0, 1, 2))
    on_gpu = ["dot_general", "sin", "dot_general", "mul"]
    assert written(gradient, *SHAPES, platform="gpu") == on_gpu
    assert written(gradient, *SHAPES, platform="tpu") == ["dot_general", "mul"]


def test_a_result_that_a_reduction_reads_too_is_written():
    def normed(x, up, down):
        hidden = x @ up
        return jnp.sum(((hidden - hidden.mean(-1, keepdims=True)) @ down) ** 2)

    assert written(normed, *SHAPES, platform="tpu") == ["dot_general"]


def test_elements_at_other_positions_are_written_before_a_product():
    def shifted(x, up, down):
        made = jnp.sin(x @ up)
        return jnp.sum((jnp.pad(made[:, 1:], ((0, 0), (0, 1))) @ down) ** 2)

    assert written(shifted, *SHAPES, platform="tpu") == ["sin", "pad"]


def test_what_several_slices_read_is_written():
    def halves(x, up):
        made = jnp.sin(x @ up)
        return jnp.sum(made[:, ::2] * made[:, 1::2])

    assert written(halves, *SHAPES[:2], platform="tpu") == ["sin"]


def test_a_wide_copy_for_a_gather_serves_no_others():
    def loss(x, up, ids):
        logits = (x @ up).astype(jnp.float32)
        right = jnp.take_along_axis(logits, ids, axis=1)
        return jnp.sum(jax.nn.logsumexp(logits, axis=1) - right[:, 0])

    half = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in SHAPES[:2]]
    ids = jax.ShapeDtypeStruct((ROWS, 1), jnp.int32)
    program = flatten(jax.make_jaxpr(loss)(*half, ids).jaxpr)
    groups = fusion(program, "tpu")
    names = [program.operations[group.end].name for group in groups]
    (wide,) = groups[names.index("convert_element_type")].writes
    readers = {name for name, group in zip(names, groups, strict=True) if wide in group.reads}
    assert readers == {"gather"}


@pytest.mark.parametrize(
    ("dims", "padding"), [((16, 224, 1024), 1.0), ((16, 196, 196), 256 / 196), ((2, 64), 2.0)]
)
def test_the_best_dim_is_padded_to_lanes(dims, padding):
    assert least_padding(dims) == padding


def test_images_are_padded_in_their_batch():
    """16 images of 224 x 224 pixels in three colours take as much as 128 of them in four."""
    assert 16 * 3 * operand_padding(16, 3) == 128 * 4
    assert operand_padding(256, 64) == operand_padding(8, 128) == 1.0


def test_long_functions_are_computed_once():
    def gelu(x, up, down):
        return jnp.sum((jax.nn.gelu(x @ up, approximate=False) @ down) ** 2)

    made = written(jax.grad(gelu, (0, 1, 2)), *SHAPES, platform="tpu")
    assert made.count("erfc") == 1
