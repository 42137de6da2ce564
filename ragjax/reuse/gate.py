"""`python -m ragjax.reuse.gate` runs `ragjax.commands.gate`."""

from ragjax.commands.gate import main

if __name__ == "__main__":
    raise SystemExit(main())
