"""Tests for your own model: equal numbers on every mesh, and only the expected communication.

```python
import shardlib as sl

def test_my_model():
    sl.testing.assert_equivalent(make_model, loss_fn, batch, ["data=8", "fsdp=4,tensor=2"])
```
"""

from shardlib.testing.collectives import Sent as Sent
from shardlib.testing.collectives import assert_collectives as assert_collectives
from shardlib.testing.equivalent import Comparison as Comparison
from shardlib.testing.equivalent import Equivalence as Equivalence
from shardlib.testing.equivalent import Reference as Reference
from shardlib.testing.equivalent import assert_equivalent as assert_equivalent
from shardlib.testing.verified import Check as Check
from shardlib.testing.verified import Small as Small
from shardlib.testing.verified import VerifiedRules as VerifiedRules
from shardlib.testing.verified import verified_rules as verified_rules
