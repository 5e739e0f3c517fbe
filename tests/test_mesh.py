import dataclasses
import itertools
import logging
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import mesh_utils
from jax.sharding import AxisType

from shardlib.errors import MeshError
from shardlib.mesh import (
    STANDARD_AXES,
    MeshAxis,
    MeshConfig,
    abstract_mesh,
    auto_mesh,
    describe,
    draw,
    make_mesh,
    mesh_sizes,
)
from shardlib.mesh.device_order import arrange, count_groups


def message(error):
    return str(error.value)


def tpu_slices(shape, *, slices=1, per_host=4, kind="TPU v5"):
    """Stand-ins with the attributes of real TPU devices, x fastest, as `jax.devices()` lists."""
    devices = []
    for index in range(slices):
        for z, y, x in np.ndindex(*reversed(shape)):
            number = len(devices)
            devices.append(
                SimpleNamespace(
                    platform="tpu", device_kind=kind, coords=(x, y, z), core_on_chip=0, id=number,
                    process_index=number // per_host, slice_index=index,
                )
            )  # fmt: skip
    return devices


def gpus(hosts, per_host=8):
    return [
        SimpleNamespace(
            platform="gpu", device_kind="NVIDIA H100 80GB HBM3", id=n, process_index=n // per_host
        )
        for n in range(hosts * per_host)
    ]


def cpus(processes, each):
    return [
        SimpleNamespace(platform="cpu", device_kind="cpu", id=1000 * p + n, process_index=p)
        for n in range(each)
        for p in range(processes)
    ]


def ids(grid):
    return np.vectorize(lambda device: device.id, otypes=[int])(grid)


# Parsing


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("data=2,fsdp=-1,tensor=2", "data=2,fsdp=-1,tensor=2"),
        (" data = 4 x 8 , fsdp=2, ", "data=4x8,fsdp=2"),
        ("data=2x-1", "data=2x-1"),
        ("data=-1x4", "data=-1x4"),
        ("data=1x8", "data=8"),
        ("tensor=2,fsdp=2,data=2", "data=2,fsdp=2,tensor=2"),
        ("tensor=2,rows=2,data=2", "tensor=2,rows=2,data=2"),
        ({"tensor": 2, "data": "4X8"}, "data=4x8,tensor=2"),
        (MeshConfig((MeshAxis("fsdp", 8),)), "fsdp=8"),
        ({"stage": 2, "expert": 2, "context": 2}, "stage=2,expert=2,context=2"),
    ],
)
def test_a_mesh_is_read_and_written(spec, text):
    config = MeshConfig.parse(spec)
    assert str(config) == text
    assert MeshConfig.parse(text) == config


def test_degrees_are_outer_and_inner():
    config = MeshConfig.parse("data=4x8,fsdp=2,tensor=-1")
    assert config.axes[0] == MeshAxis("data", inner=8, outer=4)
    assert config.sizes == {"data": 32, "fsdp": 2, "tensor": -1}
    assert config.names == ("data", "fsdp", "tensor")
    assert hash(config) == hash(MeshConfig.parse("tensor=-1,fsdp=2,data=4x8"))


def test_all_faults_are_told_at_once():
    with pytest.raises(MeshError) as error:
        MeshConfig.parse("data:2,fsdp=x,,data=3,data=2,8=3,a=-1x-1,tensor=0,model 4")
    assert message(error) == (
        "mesh 'data:2,fsdp=x,,data=3,data=2,8=3,a=-1x-1,tensor=0,model 4' cannot be read:\n"
        "  'data:2' has no '='. Did you mean 'data=2'?\n"
        "  '' has no '='. Write it as in fsdp=8.\n"
        "  'model 4' has no '='. Did you mean 'model=4'?\n"
        "  fsdp=x: a size is a whole number above 0, -1, or outer x inner as in 4x8\n"
        "  '8' is not an axis name: use letters, digits and underscores\n"
        "  tensor=0: a size is a whole number above 0, -1, or outer x inner as in 4x8\n"
        "  axis 'data' is written 2 times: write it once\n"
        "  2 sizes are -1: only one axis can take the devices that remain"
    )


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        *((spec, "data=.*: a size is ") for spec in ({"data": True}, "data=2x2x2", "data=-2")),
        ("", r"mesh ''.*\n  it has no axes: write at least one, as in data=-1"),
        (8, r"not int.*\n  Write it as"),
    ],
)
def test_what_is_no_mesh(spec, fault):
    with pytest.raises(MeshError, match=fault):
        MeshConfig.parse(spec)
    with pytest.raises(MeshError, match="axis 'data' is written 2 times"):
        MeshConfig((MeshAxis("data", 2), MeshAxis("data", 4)))


AXIS_NAMES = st.sampled_from([*STANDARD_AXES, "rows", "cols_2", "_x"])
CONFIGS = st.lists(
    st.builds(
        MeshAxis, AXIS_NAMES, st.integers(1, 4), st.integers(1, 3)
    ),
    min_size=1, max_size=5, unique_by=lambda axis: axis.name,
).map(lambda axes: MeshConfig(tuple(axes)))  # fmt: skip


@given(CONFIGS)
def test_text_and_config_round_trip(config):
    assert MeshConfig.parse(str(config)) == config
    assert MeshConfig.parse({axis.name: str(axis).split("=")[1] for axis in config.axes}) == config


@given(CONFIGS, st.data())
def test_one_open_degree_takes_what_remains(config, data):
    total = math.prod(config.sizes.values())
    position = data.draw(st.integers(0, len(config.axes) - 1))
    side = data.draw(st.sampled_from(["inner", "outer"]))
    axes = list(config.axes)
    axes[position] = dataclasses.replace(axes[position], **{side: -1})
    opened = MeshConfig(tuple(axes))
    assert opened.resolve(total) == config
    assert config.resolve(total) is config


@given(st.permutations(STANDARD_AXES))
def test_standard_axes_stand_in_one_order(names):
    assert MeshConfig.parse(dict.fromkeys(names, 2)).names == STANDARD_AXES


# Products


@pytest.mark.parametrize(
    ("spec", "fault", "fix"),
    [
        ("data=3,tensor=2", "needs 6 devices but 8", r"data=-1,tensor=2 gives 4x2.*\[:6\]"),
        ("data=16", "needs 16 devices but 8 are", r"data=-1 gives 8\)\.$"),
        ("data=3,tensor=3", "needs 9 devices", "Choose sizes whose product is 8, or run on 9"),
        ("data=1,fsdp=2,tensor=3", "needs 6 devices", r"fsdp=2,tensor=-1 gives 1x2x4.*\[:6\]"),
        ("data=-1,tensor=3", "multiply to 3, which does not divide 8", r"Pass.*\[:6\], or choose"),
        ("data=-1,tensor=16", "multiply to 16, which does not", r"Choose sizes that divide 8\."),
    ],
)
def test_a_mesh_must_multiply_out(spec, fault, fix):
    with pytest.raises(MeshError, match=rf"^mesh {spec} .*{fault}.*\n  .*{fix}"):
        make_mesh(spec)
    # There is nothing to pass to a mesh of devices that are not there.
    with pytest.raises(MeshError, match=fault) as error:
        abstract_mesh(spec, 8)
    assert "devices=" not in message(error)


# Meshes of real (CPU) devices


def test_a_mesh_of_the_devices_present():
    mesh = make_mesh("data=2,fsdp=-1,tensor=2")
    assert mesh_sizes(mesh) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert mesh.axis_types == (AxisType.Auto,) * 3
    assert mesh.devices.ravel().tolist() == jax.devices()
    assert describe(mesh) == "data=2,fsdp=2,tensor=2"
    assert make_mesh({"data": 2, "tensor": 2, "fsdp": -1}) == mesh
    assert make_mesh(MeshConfig.parse("data=2,fsdp=-1,tensor=2")) == mesh


def test_explicit_axes():
    assert make_mesh("data=8", axis_types="explicit").axis_types == (AxisType.Explicit,)
    with pytest.raises(MeshError, match=r"'manual'.\n  Write 'auto' or 'explicit'"):
        make_mesh("data=8", axis_types="manual")  # pyright: ignore[reportArgumentType]


def test_a_mesh_of_some_devices_keeps_their_order():
    chosen = [jax.devices()[i] for i in (5, 1, 3, 2)]
    assert make_mesh("fsdp=-1", devices=chosen).devices.tolist() == chosen
    with pytest.raises(MeshError, match="a mesh needs at least one device"):
        make_mesh("fsdp=-1", devices=[])


def test_outer_degrees_are_major_on_cpu():
    mesh = make_mesh("data=2x2,fsdp=2")
    assert mesh_sizes(mesh) == {"data": 4, "fsdp": 2}
    # Groups of 4: the outer half of `data` is devices 0-3, the other 4-7.
    np.testing.assert_array_equal(ids(mesh.devices), [[0, 1], [2, 3], [4, 5], [6, 7]])
    mesh = make_mesh("data=2,fsdp=2x2")
    np.testing.assert_array_equal(ids(mesh.devices), [[0, 1, 4, 5], [2, 3, 6, 7]])


def test_auto():
    assert str(auto_mesh(8)) == describe(make_mesh("auto")) == "fsdp=8"
    assert str(auto_mesh(64, num_groups=4)) == "data=4x1,fsdp=16"
    assert mesh_sizes(abstract_mesh("auto", 512)) == {"fsdp": 512}
    with pytest.raises(MeshError, match=r"8 devices evenly over 3 slices.*\n  Pass the same"):
        auto_mesh(8, num_groups=3)


def test_abstract_mesh_needs_no_devices():
    mesh = abstract_mesh("data=4x8,fsdp=-1", 4096, axis_types="explicit")
    assert mesh_sizes(mesh) == {"data": 32, "fsdp": 128}
    assert mesh.axis_types == (AxisType.Explicit,) * 2
    assert describe(mesh) == "data=32,fsdp=128"


# Placement on devices that are not here, by stand-ins


def test_the_order_follows_the_torus():
    devices = tpu_slices((4, 4, 4))
    grid = arrange(devices, names=("fsdp", "tensor"), outer=(1, 1), inner=(16, 4))
    expected = mesh_utils.create_device_mesh((16, 4), devices, allow_split_physical_axes=True)
    np.testing.assert_array_equal(ids(grid), ids(expected))
    # Neighbours along `tensor` are one hop apart on the torus.
    for row in grid:
        for a, b in itertools.pairwise(row):
            assert sum(abs(x - y) for x, y in zip(a.coords, b.coords, strict=True)) == 1


@pytest.mark.parametrize(
    ("outer", "inner"), [((2, 1), (4, 4)), ((1, 2), (2, 8)), ((2, 1), (16, 1)), ((1, 2), (1, 16))]
)
def test_outer_degrees_cross_slices(outer, inner):
    devices = tpu_slices((4, 2, 2), slices=2)
    grid = arrange(devices, names=("data", "fsdp"), outer=outer, inner=inner)
    expected = mesh_utils.create_hybrid_device_mesh(
        inner, outer, devices, allow_split_physical_axes=True
    )
    np.testing.assert_array_equal(ids(grid), ids(expected))


def test_leading_axes_cross_slices_where_no_outer_degree_is_written():
    devices = tpu_slices((4, 2, 2), slices=4)
    written = arrange(devices, names=("a", "b"), outer=(2, 2), inner=(1, 16))
    unwritten = arrange(devices, names=("a", "b"), outer=(1, 1), inner=(2, 32))
    np.testing.assert_array_equal(ids(written), ids(unwritten))


@given(sizes=st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3), data=st.data())
def test_every_device_stands_once(sizes, data):
    total = math.prod(sizes)
    slices = data.draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
    devices = tpu_slices((total // slices, 1, 1), slices=slices)
    grid = arrange(devices, names="abc"[: len(sizes)], outer=[1] * len(sizes), inner=sizes)
    assert list(grid.shape) == sizes
    assert sorted(ids(grid).ravel()) == list(range(total))


def test_hosts_are_the_groups_where_there_is_one_slice():
    grid = arrange(gpus(4), names=("data", "fsdp"), outer=(4, 1), inner=(1, 8))
    np.testing.assert_array_equal(ids(grid), np.arange(32).reshape(4, 8))
    grid = arrange(gpus(2), names=("data", "fsdp"), outer=(1, 2), inner=(2, 4))
    np.testing.assert_array_equal(
        ids(grid), [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    )


def test_cpu_processes_are_outermost():
    devices = cpus(2, 4)
    grid = arrange(devices, names=("data", "fsdp"), outer=(1, 1), inner=(2, 4))
    np.testing.assert_array_equal(ids(grid), [[0, 1, 2, 3], [1000, 1001, 1002, 1003]])
    assert count_groups(devices) == 1


@pytest.mark.parametrize(
    ("spec", "devices", "fault"),
    [
        ("data=4x8", tpu_slices((4, 4, 2)), r"form 1 slice on 8 hosts.\n.*8, or .* \(data=32\)"),
        (
            "data=2x12,fsdp=2",
            tpu_slices((4, 4, 1), slices=3),
            r"form 3 slices on 12 hosts.\n.*3, or leave them out \(data=24,fsdp=2\)",
        ),
        (
            "data=2x6",
            tpu_slices((4, 2, 1), slices=2)[:12],
            r"needs 6 devices of each .* hold 4 or 8.\n  Pass the same number",
        ),
    ],
    ids=["one slice", "three slices", "unequal"],
)
def test_groups_that_do_not_fit_the_outer_degrees(spec, devices, fault):
    with pytest.raises(MeshError, match=rf"^mesh {spec} .*{fault}"):
        make_mesh(spec, devices=devices)


@pytest.mark.parametrize("shape", [(140, 64), (70, 64, 2), (2, 35, 128), (8960,)])
def test_a_full_v5p_pod(shape, caplog):
    # mesh_utils cannot split 16x20x28 into some of these shapes.
    devices = tpu_slices((16, 20, 28))
    ones = (1,) * len(shape)
    grid = arrange(devices, names=("data", "fsdp", "tensor")[: len(shape)], outer=ones, inner=shape)
    assert grid.shape == shape
    assert len(set(ids(grid).ravel())) == 8960
    assert not caplog.text
    # The devices of the last axis fill a box.
    for row in grid.reshape(-1, shape[-1])[:70]:
        places = np.array([device.coords for device in row])
        assert np.prod(np.ptp(places, axis=0) + 1) == shape[-1]


def test_devices_with_a_hole_are_placed_by_coordinates(caplog):
    devices = tpu_slices((3, 2, 1), kind="TPU v4")
    devices = [d for d in devices if d.coords not in ((1, 0, 0), (2, 1, 0))]
    with caplog.at_level(logging.WARNING):
        grid = arrange(devices, names=("data",), outer=(1,), inner=(4,))
    assert [d.coords for d in grid] == [(0, 0, 0), (0, 1, 0), (1, 1, 0), (2, 0, 0)]
    assert "the 4 TPU v4 devices do not form a cuboid: the mesh 4 takes them" in caplog.text


# Drawing


def drawn(devices, **axes):
    """A drawing needs of a mesh its axis sizes and its devices only."""
    grid = arrange(devices, names=tuple(axes), outer=(1,) * len(axes), inner=tuple(axes.values()))
    return draw(SimpleNamespace(devices=grid, shape=axes))  # pyright: ignore[reportArgumentType]


def test_draw_slices_and_hosts():
    assert drawn(tpu_slices((2, 2, 1), slices=2, per_host=2), data=2, fsdp=4) == (
        "data=2,fsdp=4 over 8 TPU v5 devices in 2 slices on 4 hosts\n"
        "  data\\fsdp      0      1      2      3\n"
        "          0  0:0:0  0:1:2  0:0:1  0:1:3\n"
        "          1  1:2:4  1:3:6  1:2:5  1:3:7\n"
        "  cells: slice:process:device"
    )


def test_draw_a_big_mesh_as_lines():
    assert drawn(tpu_slices((8, 8, 1), slices=2), data=2, fsdp=16, tensor=4) == (
        "data=2,fsdp=16,tensor=4 over 128 TPU v5 devices in 2 slices on 32 hosts\n"
        "  data        2  across 2 slices\n"
        "  fsdp       16  across 16 hosts\n"
        "  tensor      4  within a host"
    )
