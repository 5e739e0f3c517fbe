"""Partitioning of traced programs by shardlib itself.

XLA's partitioner decides the sharding of values without constraints, and it has been measured to
return wrong numbers silently (docs/xla_faults.md). Here the decision is made on the traced program:
`factors` describes how each operation may be cut, `analyze` chooses the layout of every value, and
`lower` executes the result as one fully manual program with explicit collectives.
"""

from shardlib.partitioner.entry import Analyzed as Analyzed
from shardlib.partitioner.entry import Partition as Partition
from shardlib.partitioner.entry import Traced as Traced
from shardlib.partitioner.entry import analyze as analyze
from shardlib.partitioner.entry import execute as execute
from shardlib.partitioner.entry import partitioned as partitioned
from shardlib.partitioner.entry import trace as trace
from shardlib.partitioner.entry import who_partitions as who_partitions
from shardlib.partitioner.layout import Layout as Layout
from shardlib.partitioner.layout import from_spec as from_spec
