"""Sharding of arrays: the active mesh and rules, placements of states, manual regions."""
