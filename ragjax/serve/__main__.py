"""`python -m ragjax.serve`."""

import sys

from ragjax.serve.command import main

sys.exit(main())
