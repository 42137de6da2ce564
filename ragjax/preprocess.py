"""`python -m ragjax.preprocess` runs `ragjax.commands.preprocess`."""

from ragjax.commands.preprocess import main

if __name__ == "__main__":
    raise SystemExit(main())
