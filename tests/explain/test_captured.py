"""What XLA logs while it compiles, and that it is known when it logs nothing."""

import dataclasses
import os
import subprocess
import sys

import jax
import pytest

from shardlib.explain.aot.compile import compile_step
from shardlib.explain.report.report import report_on
from shardlib.hardware import parse_cluster

SCRIPT = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from shardlib.explain.aot.compile import compile_step
from shardlib.explain.lint import Subject, lint

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
cut = lambda h, *spec: jax.lax.with_sharding_constraint(h, NamedSharding(mesh, P(*spec)))

def step(x):
    h = cut(x, "fsdp", "tensor").reshape(64, 32, 1024)
    return jnp.sum(jnp.sin(cut(h, None, ("tensor", "fsdp"))))

x = jax.ShapeDtypeStruct((2048, 1024), "float32", sharding=NamedSharding(mesh, P("fsdp")))
made = compile_step(step, (x,))
print(made.warnings is None, [finding.code for finding in lint(Subject.of(made))].count("SL104"))
"""


@pytest.mark.aot
def test_hidden_warnings_are_not_taken_for_none(tmp_path):
    base = {**os.environ, "SHARDLIB_CACHE": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    found = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**base, "TF_CPP_MIN_LOG_LEVEL": level},
            capture_output=True, text=True, check=True,
        ).stdout.strip()
        # What is hidden is not taken for nothing, neither then nor by a later run.
        for level in ("2", "1", "3")
    ]  # fmt: skip
    assert found == ["True 0", "False 1", "False 1"]


def test_a_report_tells_that_warnings_are_hidden():
    x = jax.ShapeDtypeStruct((4,), "float32")
    step = compile_step(jax.numpy.sum, (x,), on=parse_cluster("cpu:1"), keep=False)
    assert report_on(step).notes() == []
    assert report_on(dataclasses.replace(step, warnings=None)).notes() == [
        "compiler warnings are unknown, such as full rematerialization (SL104): "
        "TF_CPP_MIN_LOG_LEVEL of 2 or more hides them, set it to 1"
    ]
