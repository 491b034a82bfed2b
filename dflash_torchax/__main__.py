"""`python -m dflash_torchax`: the same command line as `dflash-torchax`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
