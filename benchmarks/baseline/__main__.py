"""The server with the baselines of the tables besides its own strategies, policies and orders.

python -m benchmarks.baseline [flags of ragjax serve]
"""

from __future__ import annotations

import sys

import benchmarks.baseline  # noqa: F401 (registers its names)
from ragjax.serve.command import main

if __name__ == "__main__":
    sys.exit(main())
