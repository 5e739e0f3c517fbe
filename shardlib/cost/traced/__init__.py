"""The cost of any model from its traced program."""
