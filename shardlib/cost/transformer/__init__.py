"""The cost of a transformer from its published dimensions."""
