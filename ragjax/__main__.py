"""`python -m ragjax` is `ragjax`."""

import sys

from ragjax.cli import main

if __name__ == "__main__":
    sys.exit(main())
