"""Costs of one step of inference, from the dimensions of a decoder."""
