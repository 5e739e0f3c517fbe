"""`python -m shardlib` is the command `shardlib`."""

from shardlib.cli import main

if __name__ == "__main__":
    main()
