"""Optimizers: configs, schedules and the optax transformations that optax lacks."""
