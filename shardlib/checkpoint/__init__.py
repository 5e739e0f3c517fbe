"""Checkpoints of a run: any state, any mesh, bit for bit.

    with RunCheckpoints("run/checkpoints", CheckpointConfig(keep=2)) as checkpoints:
        checkpoints.save(100, state, {"mesh": "fsdp=8", "samples_seen": 12_800})
        ...
        state = checkpoints.restore(checkpoints.latest(), target)

The format is described in `store.py` (directories), `manifest.py` (the document beside the arrays)
and `tree.py` (names of leaves).
"""

from shardlib.checkpoint.config import CheckpointConfig as CheckpointConfig
from shardlib.checkpoint.manifest import Manifest as Manifest
from shardlib.checkpoint.store import RunCheckpoints as RunCheckpoints
