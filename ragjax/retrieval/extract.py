"""`python -m ragjax.retrieval.extract` runs `ragjax.commands.extract`."""

from ragjax.commands.extract import main

if __name__ == "__main__":
    raise SystemExit(main())
