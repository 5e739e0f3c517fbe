"""Plans for clusters of several kinds of GPUs."""
