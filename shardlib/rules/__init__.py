"""Rules that map logical axes to mesh axes, and their resolution for one tensor.

A table of rules is an ordered mapping from a logical axis to one of

* a mesh axis, `"fsdp"`;
* several mesh axes, `("data", "fsdp")` or `"data+fsdp"`: their product;
* `None`: replicated on purpose;
* a list of such alternatives, tried in order.

A logical axis without a rule may be named after a mesh axis, or several (`"data+fsdp"`). It then
goes to that axis, so a model annotated by hand for one mesh is placed as annotated. A rule for that
name, or for every other name (`"*"`), takes precedence.

Resolution takes the logical axes of a tensor in the order of the table. An alternative is rejected
if one of its mesh axes already shards another dim of the tensor, or if their product does not
divide the dim. The first alternative that fits wins. A standard mesh axis that the mesh does not
have counts as an axis of size 1, which shards nothing. If every alternative is rejected the tensor
cannot be placed as asked, and that is an error, never a silent replication.
"""

from shardlib.mesh import STANDARD_AXES as STANDARD_AXES
from shardlib.rules.analysis import ActivationNames as ActivationNames
from shardlib.rules.config import RulesConfig as RulesConfig
from shardlib.rules.config import from_yaml as from_yaml
from shardlib.rules.config import to_yaml as to_yaml
from shardlib.rules.presets import DATA as DATA
from shardlib.rules.presets import FSDP as FSDP
from shardlib.rules.presets import PRESETS as PRESETS
from shardlib.rules.presets import SEQUENCE as SEQUENCE
from shardlib.rules.presets import SERVE as SERVE
from shardlib.rules.presets import STANDARD as STANDARD
from shardlib.rules.presets import ZERO1 as ZERO1
from shardlib.rules.presets import ZERO2 as ZERO2
from shardlib.rules.presets import preset as preset
from shardlib.rules.resolve import ANY as ANY
from shardlib.rules.resolve import Auto as Auto
from shardlib.rules.resolve import Choice as Choice
from shardlib.rules.resolve import Refusal as Refusal
from shardlib.rules.resolve import Resolution as Resolution
from shardlib.rules.resolve import Section as Section
from shardlib.rules.table import AxisRules as AxisRules
