"""Parsing of compiled XLA programs: instructions, buffers, replica groups and sources."""
