"""Ahead-of-time compilation of steps, with or without the target devices attached."""
