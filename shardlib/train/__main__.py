"""`python -m shardlib.train CONFIG` is the command `shardlib train CONFIG`."""

import sys

from shardlib.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
