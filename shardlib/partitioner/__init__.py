"""Partitioning of traced programs by shardlib itself.

XLA's partitioner decides where values lie that nobody constrains, and it has been measured to
return wrong numbers without a word (docs/xla_faults.md). Here the decision is made on the traced
program: `factors` says how each operation may be cut, `analyze` where every value lies, and `lower`
executes that as one fully manual program whose collectives are written out.
"""

from shardlib.partitioner.decided import Partition as Partition
from shardlib.partitioner.decided import who_partitions as who_partitions
from shardlib.partitioner.entry import Laid as Laid
from shardlib.partitioner.entry import Traced as Traced
from shardlib.partitioner.entry import analyze as analyze
from shardlib.partitioner.entry import execute as execute
from shardlib.partitioner.entry import partitioned as partitioned
from shardlib.partitioner.entry import trace as trace
from shardlib.partitioner.layout import Layout as Layout
from shardlib.partitioner.layout import from_spec as from_spec
