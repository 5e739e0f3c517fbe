"""Random Flax models on random placements and meshes, each decided by a seed."""
