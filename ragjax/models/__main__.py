"""`python -m ragjax.models` runs `ragjax.commands.models`."""

from ragjax.commands.models import main

if __name__ == "__main__":
    raise SystemExit(main())
