"""A report as one HTML page that holds all it needs."""

from shardlib.explain.html.page import page as page
