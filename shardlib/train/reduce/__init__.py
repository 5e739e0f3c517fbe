"""Reduction of the gradients of data-parallel groups."""
