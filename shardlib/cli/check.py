"""`shardlib check`."""

import json
import os
from typing import Annotated

import typer

from shardlib.cli.arguments import AsJson, ConfigPath, Overrides, load_config, say

Meshes = Annotated[
    list[str] | None,
    typer.Option(
        "--mesh", metavar="MESH", help="A mesh to check, such as fsdp=4,tensor=2; repeatable."
    ),
]


def check(
    config: ConfigPath, overrides: Overrides = None, mesh: Meshes = None, as_json: AsJson = False
) -> None:
    """Prove that a config computes the same numbers on its mesh as on one device.

    A small version of the model runs on virtual CPU devices. Losses, gradients and optimizer state
    are compared leaf by leaf. Exits 1 if anything differs.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    loaded = load_config(config, overrides)
    from shardlib.run.reports.proving import DEVICES, prove, tables
    from shardlib.runtime.distributed import local_cpu_devices

    local_cpu_devices(DEVICES)
    proofs = [prove(loaded, one) for one in mesh or (None,)]
    if as_json:
        facts = [
            {
                "mesh": dict(proof.comparison.mesh.shape),
                "right": proof.is_right,
                "compared": proof.comparison.num_compared,
                "differ": [dict(zip(_COLUMNS, row, strict=True)) for row in proof.rows()],
            }
            for proof in proofs
        ]
        print(json.dumps(facts, indent=2))
    else:
        say(tables(proofs))
    if not all(proof.is_right for proof in proofs):
        raise typer.Exit(1)


_COLUMNS = ("quantity", "error", "magnitude", "rounding")
