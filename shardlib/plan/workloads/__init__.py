"""Workloads of the planner: transformers by their dims, and traced modules."""
