"""`python -m ragjax.cache` runs `ragjax.commands.cache`."""

from ragjax.commands.cache import main

if __name__ == "__main__":
    raise SystemExit(main())
