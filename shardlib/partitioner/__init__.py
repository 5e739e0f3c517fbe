"""Partitioning of traced programs by shardlib itself.

XLA's partitioner decides where values lie that nobody constrains, and it has been measured to return
wrong numbers without a word (docs/xla_faults.md). Here the decision is made on the traced program:
`factors` says how each operation may be cut, `analyze` where every value lies, `lower` executes that
as one fully manual program with its collectives written out.
"""

from shardlib.partitioner.entry import partitioned as partitioned
