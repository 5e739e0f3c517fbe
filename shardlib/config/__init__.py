"""Typed, frozen configs: read from YAML and overrides, with every fault reported at once.

```python
@configclass
class TrainConfig:
    steps: int = 1000
    \"\"\"Optimizer steps.\"\"\"

config = load(TrainConfig, "run.yaml", ["steps=2000"])
```
"""

from shardlib.config.classes import ImportPath as ImportPath
from shardlib.config.classes import Variants as Variants
from shardlib.config.classes import configclass as configclass
from shardlib.config.describe import Key as Key
from shardlib.config.describe import json_schema as json_schema
from shardlib.config.describe import keys as keys
from shardlib.config.dump import ABSENT as ABSENT
from shardlib.config.dump import Change as Change
from shardlib.config.dump import diff as diff
from shardlib.config.dump import to_dict as to_dict
from shardlib.config.dump import to_yaml as to_yaml
from shardlib.config.read import from_dict as from_dict
from shardlib.config.read import from_yaml as from_yaml
from shardlib.config.read import load as load
