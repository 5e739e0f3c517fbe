"""What the exit code of a process says: `shardlib launch` and schedulers decide by it."""

FAILED = 1
"""Anything without a code of its own."""

WRONG_REQUEST = 2
"""What was asked for is wrong (usage, config, mesh, rules, model): it would fail again."""

HUNG = 75
"""The watchdog ended a process that made no progress, or whose peers had gone: try again.

The number is `EX_TEMPFAIL` of sysexits.h.
"""

DIVERGED = 76
"""Training does not recover from non-finite or spiking values: it fails again at the same step."""
