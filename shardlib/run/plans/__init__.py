"""Plans of runs: workloads from configs, and calibrations of devices."""
