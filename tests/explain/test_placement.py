"""Pictures of where the pieces of arrays live."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardlib as sl


def drawn(mesh, spec, shape):
    sharding = NamedSharding(sl.make_mesh(mesh), P(*spec))
    array = jax.device_put(jnp.zeros(shape), sharding)
    picture = sl.draw(array)
    # A sharding, or the shape of an array that nobody has made, has the same picture.
    assert sl.draw(sharding, shape) == picture
    assert sl.draw(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)) == picture
    return picture


PICTURES = {
    "scalar": ("data=8", (), (), "scalar in 1 piece\n  0-7"),
    "two dims": (
        "fsdp=4,tensor=2",
        ("tensor", "fsdp"),
        (4, 8),
        "4x8 in 8 pieces\n"
        "             dim 1 [0:2]  dim 1 [2:4]  dim 1 [4:6]  dim 1 [6:8]\n"
        "dim 0 [0:2]  0            2            4            6\n"
        "dim 0 [2:4]  1            3            5            7",
    ),
    "product of axes": (
        "data=2,fsdp=2,tensor=2",
        (("data", "fsdp"),),
        (4,),
        "4 in 4 pieces\ndim 0 [0:1]  0,1\ndim 0 [1:2]  2,3\ndim 0 [2:3]  4,5\ndim 0 [3:4]  6,7",
    ),
}


@pytest.mark.parametrize(("mesh", "spec", "shape", "picture"), PICTURES.values(), ids=PICTURES)
def test_draws(mesh, spec, shape, picture):
    assert drawn(mesh, spec, shape) == picture
