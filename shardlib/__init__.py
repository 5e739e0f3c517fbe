"""Named sharding for Flax models on any mesh."""

__version__ = "0.1.0"
