"""Configs as they should be, compiled for TPUs: faults that only their programs can have."""

from pathlib import Path

import pytest

from shardlib.config import load
from shardlib.explain.lint import Limits
from shardlib.run.config import RunConfig
from shardlib.run.reports.explaining import explain_compiled

pytestmark = pytest.mark.aot

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
# What is small counts too, so that a small model has the faults of large ones.
STRICT = Limits(
    replicated_bytes=2**16, activation_bytes=2**16, traffic_bytes=2**16, donated_bytes=2**12
)


# The quickstart's own dims are a single tile of a TPU: cut, they are padded, which is a fault.
WIDE = (
    "model.embed_dim=256",
    "model.num_heads=2",
    "model.mlp_dim=512",
    "data.sequence_length=512",
)


@pytest.mark.parametrize(
    ("mesh", "more"),
    [("fsdp=8", ()), ("fsdp=4,tensor=2", WIDE), ("data=2,fsdp=2,context=2", WIDE)],
)
def test_the_quickstart_has_no_faults_on_tpus(mesh, more):
    pytest.importorskip("libtpu", reason="needs the extra tpu")
    config = load(RunConfig, str(QUICKSTART), [f"mesh={mesh}", *more])
    report = explain_compiled(config, "v5e-8", limits=STRICT)
    assert [str(finding) for finding in report.findings] == []
