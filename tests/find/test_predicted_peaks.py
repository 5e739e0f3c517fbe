"""Predicted memory of found rules beside that of the step compiled for TPUs."""

import argparse

import pytest

import find_rules as benchmark
from collectives import devices_of

FLAGS = argparse.Namespace(tiny=False, partitioners=False)


@pytest.mark.aot
@pytest.mark.rest("soak")
@pytest.mark.parametrize(
    ("model", "mesh"),
    [("unet", "fsdp=4,tensor=2"), ("graph", "fsdp=8"), ("mamba", "data=2,fsdp=2,tensor=2")],
)
def test_peaks_are_within_a_tenth(tpu_devices, model, mesh):
    cluster, devices = devices_of("v5e-8")
    found = benchmark.find(model, mesh, FLAGS, cluster)
    told = benchmark.predicted(found)
    true = benchmark.compiled(model, mesh, found.rules, FLAGS, cluster, devices)
    assert told["peak"] == pytest.approx(true.peak, rel=0.1)
    assert told["sent"] == pytest.approx(true.sent, rel=0.05)
