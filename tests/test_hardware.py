from types import SimpleNamespace

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlib.errors import MeshError
from shardlib.hardware import (
    CHIPS,
    MixedCluster,
    chip_for,
    of_one_kind,
    parse_cluster,
    parse_mixed,
)
from shardlib.hardware.free_memory import left_by_limit

TERA, GIGA, GIB = 1e12, 1e9, 2**30

# As printed by the vendors, checked by hand: dense bf16 TFLOP/s, memory bytes, memory GB/s,
# int8 TOP/s, fp8 TFLOP/s.
PUBLISHED = {
    "v3": (123, 32 * GIB, 900, None, None),
    "v4": (275, 32 * GIB, 1200, 275, None),
    "v5e": (197, 16e9, 819, 393, None),
    "v5p": (459, 95 * GIB, 2765, 918, 459),
    "v6e": (918, 32e9, 1600, 1836, 918),
    "tpu7x": (2307, 192 * GIB, 7380, None, 4614),
    "a100-40": (312, 40e9, 1555, None, None),
    "a100-80": (312, 80e9, 2039, None, None),
    "h100": (989.5, 80e9, 3350, None, 1979),
    "h200": (989.5, 141e9, 4800, None, 1979),
    "h800": (989.5, 80e9, 3350, None, 1979),
    "h20": (148, 96e9, 4000, None, 296),
    "b200": (2250, 180e9, 8000, None, 4500),
    "b300": (2250, 270e9, 8000, None, 4500),
    "gb200": (2500, 186e9, 8000, None, 5000),
    "gb300": (2500, 279e9, 8000, None, 5000),
    "l4": (121, 24e9, 300, None, 242),
    "a10": (125, 24e9, 600, None, None),
    "t4": (None, 16e9, 320, None, None),
    "v100-32": (None, 32e9, 900, None, None),
    "rtx4090": (165.2, 24e9, 1008, None, 330.3),
}

# Links as sold, which is both directions together: GB/s of ICI of a TPU chip, of NVLink of a GPU.
SOLD_BOTH_WAYS = {
    "v3": 656, "v4": 600, "v5e": 400, "v5p": 1200, "v6e": 800, "tpu7x": 1200,
    "a100-40": 600, "a100-80": 600, "h100": 900, "h200": 900, "h800": 400, "h20": 900, "b200": 1800,
    "b300": 1800, "gb200": 1800, "gb300": 1800, "v100-32": 300,
}  # fmt: skip


def tera(value):
    return None if value is None else pytest.approx(value * TERA)


@pytest.mark.parametrize("name", CHIPS)
def test_figures_equal_the_published_ones(name):
    chip = CHIPS[name]
    bf16, memory, bandwidth, int8, fp8 = PUBLISHED[name]
    assert chip.bf16_flops == tera(bf16)
    assert chip.memory_bytes == memory
    assert chip.memory_bytes_per_second == bandwidth * GIGA
    assert chip.int8_ops == tera(int8)
    assert chip.fp8_flops == tera(fp8)
    assert chip.sources


@pytest.mark.parametrize("name", CHIPS)
def test_links_are_given_in_one_direction(name):
    chip = CHIPS[name]
    ici = chip.ici_links * (chip.ici_bytes_per_second_per_link or 0)
    one_way = ici + (chip.nvlink_bytes_per_second or 0)
    assert 2 * one_way == SOLD_BOTH_WAYS.get(name, 0) * GIGA
    achievable = chip.ici_achievable_bytes_per_second_per_link
    assert achievable is None or achievable == 0.9 * (chip.ici_bytes_per_second_per_link or 0)


def test_the_ratios_of_arithmetic_to_traffic():
    # FLOPs per byte of memory, and per byte of the data-centre network.
    for name, memory, network in [
        ("v5e", 240.5, 63040), ("v5p", 166.0, 73440), ("h100", 295.4, 19790), ("b200", 281.2, 45000)
    ]:  # fmt: skip
        chip = CHIPS[name]
        cluster = parse_cluster({"v5e": "v5e-16", "v5p": "v5p-8"}.get(name, f"8x{name}"))
        assert chip.bf16_flops / chip.memory_bytes_per_second == pytest.approx(memory, rel=1e-3)
        share = cluster.network_bytes_per_second_per_device
        assert chip.bf16_flops / share == pytest.approx(network, rel=1e-3)


def test_figures_of_one_device():
    chip = CHIPS["tpu7x"]
    assert chip.flops_per_device() == 1153.5e12
    assert chip.flops_per_device("fp8") == 2307e12
    assert chip.memory_bytes_per_device == 96 * GIB
    assert CHIPS["t4"].flops_per_device() is None
    assert CHIPS["t4"].flops_per_device("fp16") == 65e12


@pytest.mark.parametrize(
    ("name", "chip", "devices", "hosts", "per_host", "slices"),
    [
        # v4 and v5p count TensorCores, two to a chip ...
        ("v5p-8", "v5p", 4, 1, 4, 1),
        ("v5p-128", "v5p", 64, 16, 4, 1),
        ("v4-32", "v4", 16, 4, 4, 1),
        ("v3-8", "v3", 8, 1, 8, 1),
        ("v3-32", "v3", 32, 4, 8, 1),
        # ... v5e and v6e chips, lent 4 to a host where there are several hosts.
        ("v5e-1", "v5e", 1, 1, 1, 1),
        ("v5e-8", "v5e", 8, 1, 8, 1),
        ("v5litepod-16", "v5e", 16, 4, 4, 1),
        ("v6e-256", "v6e", 256, 64, 4, 1),
        ("v5p:4x4x4", "v5p", 64, 16, 4, 1),
        ("v5e:2x2", "v5e", 4, 1, 4, 1),
        ("2xv5e-256", "v5e", 512, 128, 4, 2),
        ("4xv5p:2x2x1", "v5p", 16, 4, 4, 4),
        # Two JAX devices a chip.
        ("tpu7x:4x4x4", "tpu7x", 128, 16, 8, 1),
        ("h100", "h100", 1, 1, 1, 1),
        ("8xh100", "h100", 8, 1, 8, 1),
        ("8xH100", "h100", 8, 1, 8, 1),
        ("2xl4", "l4", 2, 1, 2, 1),
        ("16xh200", "h200", 16, 2, 8, 1),
        ("4x8xa100-80", "a100-80", 32, 4, 8, 1),
        ("2x4xa100-40", "a100-40", 8, 2, 4, 1),
        ("72xgb200", "gb200", 72, 18, 4, 1),
        ("4xgb300-nvl64", "gb300", 256, 64, 4, 1),
        ("10x1xrtx4090", "rtx4090", 10, 10, 1, 1),
    ],
)
def test_clusters_by_name(name, chip, devices, hosts, per_host, slices):
    cluster = parse_cluster(name)
    assert cluster.chip is CHIPS[chip]
    assert cluster.num_devices == devices
    assert (cluster.num_hosts, cluster.devices_per_host) == (hosts, per_host)
    assert cluster.num_slices == slices
    assert cluster.num_chips == devices // cluster.chip.devices_per_chip


@pytest.mark.parametrize(
    ("name", "together"),
    [
        # A rack of GB200 or GB300 joins 18 hosts of 4; every other GPU has NVLink within its host.
        ("gb200-nvl72", 72), ("4xgb200-nvl72", 72), ("8xgb300-nvl64", 64), ("2xgb200-nvl36", 36),
        ("8xgb200", 8), ("72xgb200", 72), ("128xgb200", 64), ("576xgb300", 72), ("76xgb200", 4),
        ("16xb300", 8), ("4x8xh100", 8), ("2x4xa100-40", 4), ("4xl4", 4), ("2x4xt4", 4),
        ("v5p-128", 64), ("2xv5e-256", 256), ("cpu:8", 8),
    ],
)  # fmt: skip
def test_devices_that_no_network_separates(name, together):
    assert parse_cluster(name).devices_per_domain == together


def test_cpu_devices_are_a_cluster_without_a_chip():
    cluster = parse_cluster("cpu:8")
    assert (cluster.chip, cluster.num_devices, cluster.num_hosts) == (None, 8, 1)
    assert cluster.network_bytes_per_second_per_device is None


KNOWN = ", ".join(CHIPS)
USAGE = (
    "  Name a TPU slice (v5p-128), GPUs (8xh100; 4x8xh100 for 4 hosts) or cpu:8, with one of: "
    f"{KNOWN}."
)


def test_a_cluster_that_is_unknown_is_named_with_what_could_be_meant():
    with pytest.raises(MeshError) as error:
        parse_cluster("8xh10")
    assert str(error.value) == f"cluster '8xh10' is unknown. Did you mean 'h100'?\n{USAGE}"


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("v5p128", "Did you mean 'v5p-128'?"),
        ("2xv5e256", "Did you mean '2xv5e-256'?"),
        ("100", "Did you mean 'h100'?"),
        ("v5o-128", "Did you mean 'v5p'?"),
        ("4x8xa100", "Write a100-40 or a100-80."),
        pytest.param("quantum", USAGE, id="quantum"),
        pytest.param("", USAGE, id="empty"),
        ("v5p", "Add the size of the slice, as in v5p-8."),
        ("0xh100", "Write counts of at least 1."),
        ("cpu:0", "Write counts of at least 1."),
        *((name, "as in cpu:8.") for name in ("cpu:x", "cpu", "cpus:4", "cpu-8", "8xcpu", "cpu8")),
        ("12xh100", "Write hosts x GPUs of each, as in 2x8xh100."),
        ("2x16xh100", "Write hosts x GPUs of each, as in 2x8xh100."),
        ("v5p-9", "Write v5p-18 for 9 chips."),
        ("v5e-512", "Join several slices, as in 2xv5e-..."),
        ("v6e-10", "Choose a multiple of 4 chips, as in v6e-8 or v6e-12."),
        ("2xgb200-nvl80", "as in 4xgb200-nvl64."),
        ("gb200-nvl6", "as in 4xgb200-nvl64."),
        ("2xh100-nvl8", "Write hosts x GPUs of each, as in 2x8xh100."),
        ("tpu7x-16", "Give the topology in chips instead, as in tpu7x:4x4x4."),
    ],
)
def test_clusters_that_cannot_be(name, fix):
    with pytest.raises(MeshError) as error:
        parse_cluster(name)
    assert str(error.value).startswith(f"cluster '{name}'")
    assert fix in str(error.value)


@given(
    hosts=st.integers(1, 64),
    per_host=st.integers(1, 8),
    chip=st.sampled_from([name for name, chip in CHIPS.items() if chip.kind == "gpu"]),
)
def test_hosts_times_gpus(hosts, per_host, chip):
    per_host = min(per_host, CHIPS[chip].chips_per_host or per_host)
    cluster = parse_cluster(f"{hosts}x{per_host}x{chip}")
    assert cluster.num_devices == hosts * per_host
    assert cluster.num_hosts == hosts


def test_mixed_clusters_by_name():
    mixed = parse_mixed(" 8xH100 + 2x8xa100-80+16xb200")
    assert mixed.name == "8xh100+2x8xa100-80+16xb200"
    assert [kind.num_devices for kind in mixed.kinds] == [8, 16, 16]
    assert (mixed.num_devices, mixed.num_chips, mixed.num_hosts) == (40, 40, 5)
    assert parse_mixed(mixed.name) == mixed == MixedCluster(mixed.kinds)


@pytest.mark.parametrize(
    ("name", "fault", "fix"),
    [
        ("8xh100+cpu:8", "has CPU devices", "Mix GPUs, as in 8xh100+16xa100-80."),
        ("v5p-8+8xh100", "mixes TPUs and GPUs", "Plan for each alone, or mix GPUs"),
        ("v5p-8+v5e-8", "mixes generations of TPUs", "Plan for each alone, or mix GPUs"),
        ("8xh100+2x8xh100", "names h100 more than once", "Write each kind once"),
        (
            "4xh100+2x8xa100-80",
            "has hosts of 4 h100 and of 8 a100-80",
            "Use the same number, as in 1x4xh100+2x4xa100-80.",
        ),
        ("8xh100+", "lacks a part next to a '+'", "Write it as in 8xh100+16xa100-80."),
    ],
)
def test_kinds_that_cannot_be_mixed(name, fault, fix):
    with pytest.raises(MeshError) as error:
        parse_mixed(name)
    assert str(error.value).startswith(f"cluster '{name}' {fault}")
    assert f"\n  {fix}" in str(error.value)


def test_a_mixed_cluster_has_several_known_parts():
    with pytest.raises(MeshError, match=r"cluster '8xh10' is unknown. Did you mean 'h100'\?"):
        parse_mixed("8xh100+8xh10")
    with pytest.raises(MeshError, match=r"'8xh100' has only one part\.\n  Join several, as in"):
        MixedCluster((parse_cluster("8xh100"),))


@pytest.mark.parametrize("read", [parse_cluster, lambda name: of_one_kind(parse_mixed(name))])
def test_where_one_kind_is_wanted(read):
    with pytest.raises(MeshError, match=r"several kinds of chips, .*\n  Name one .* 8xh100;"):
        read("8xh100+16xa100-80")
    cluster = parse_cluster("8xh100")
    assert of_one_kind("8xh100") == of_one_kind(cluster) == cluster


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v4", "v4"), ("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"), ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("Tesla T4", "t4"), ("NVIDIA L4", "l4"), ("TPU v3", "v3"), ("NVIDIA GB200", "gb200"),
        # Other parts, with other figures.
        ("NVIDIA H100 PCIe", None), ("NVIDIA A10G", None), ("NVIDIA L40S", None), ("cpu", None),
    ],
)  # fmt: skip
def test_the_chip_of_a_device(kind, name):
    chip = chip_for(SimpleNamespace(device_kind=kind))
    assert (chip and chip.name) == name


@pytest.mark.gpu
def test_the_gpu_at_hand_is_known():
    chip = chip_for(jax.devices()[0])
    assert chip is not None
    assert chip.kind == "gpu"


def test_cached_files_do_not_count_against_the_limit_of_a_container(tmp_path):
    assert left_by_limit(tmp_path) is None
    files = {"max": "1000\n", "current": "700\n", "stat": "anon 350\nfile 300\nshmem 100\n"}
    for name, text in files.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert left_by_limit(tmp_path) == 1000 - (700 - (300 - 100))
    (tmp_path / "memory.max").write_text("max\n")
    assert left_by_limit(tmp_path) is None
