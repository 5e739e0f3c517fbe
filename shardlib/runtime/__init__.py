"""Process groups, signals, preemption, watchdogs and launching."""
