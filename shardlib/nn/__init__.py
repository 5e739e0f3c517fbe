"""Layers sharded over devices: attention, experts, stacks of layers, rematerialisation."""
