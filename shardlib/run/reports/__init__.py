"""Reports on runs that do not train: placements, proofs on small meshes, compiled plans."""
