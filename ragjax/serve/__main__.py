"""`python -m ragjax.serve` is `ragjax serve`."""

import sys

from ragjax.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
