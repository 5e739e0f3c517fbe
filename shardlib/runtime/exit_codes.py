"""Exit codes of a process, by which `shardlib launch` and schedulers decide on a restart."""

FAILED = 1
"""Any failure without a specific code."""

WRONG_REQUEST = 2
"""The request is wrong (usage, config, mesh, rules, model): it would fail again."""

HUNG = 75
"""The watchdog ended a process without progress, or the process lost its peers: try again.

The number is `EX_TEMPFAIL` of sysexits.h.
"""

DIVERGED = 76
"""Training does not recover from non-finite or spiking values: it fails again at the same step."""
