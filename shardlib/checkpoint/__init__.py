"""Checkpoints of a run: any state on any mesh, restored bit for bit and verified.

```python
with RunCheckpoints("run/checkpoints", CheckpointConfig(keep=2)) as checkpoints:
    checkpoints.save(100, state, {"mesh": "fsdp=8", "samples_seen": 12_800})
    ...
    if newest := checkpoints.restore_newest(target):  # None before the first save.
        manifest, state = newest

saved = SavedCheckpoints("run/checkpoints")  # Read-only; nested dicts of numpy arrays here.
arrays = saved.restore(100, saved.target(100))
```

The format is described in `run_checkpoints.py` (directories), `manifest.py` (the JSON manifest),
`fingerprint.py` (verification of values) and `tree.py` (names of leaves).
"""

from shardlib.checkpoint.config import CheckpointConfig as CheckpointConfig
from shardlib.checkpoint.config import KeepBest as KeepBest
from shardlib.checkpoint.config import LocalTier as LocalTier
from shardlib.checkpoint.manifest import Manifest as Manifest
from shardlib.checkpoint.reading import SavedCheckpoints as SavedCheckpoints
from shardlib.checkpoint.reading import open_saved as open_saved
from shardlib.checkpoint.run_checkpoints import RunCheckpoints as RunCheckpoints
from shardlib.checkpoint.run_checkpoints import open_checkpoints as open_checkpoints

SavedTiers = SavedCheckpoints
"""Another name of `SavedCheckpoints`, which may be in several places."""
TieredCheckpoints = RunCheckpoints
"""Another name of `RunCheckpoints`, which may be in several places."""
