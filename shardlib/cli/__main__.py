"""Entry point of `python -m shardlib.cli`."""

from shardlib.cli import main

main()
