"""Achieved performance of a machine: constants, rates, kernels and links."""
