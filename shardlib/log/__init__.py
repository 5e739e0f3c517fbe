"""Logging of a run: progress display, metrics, events and goodput."""
