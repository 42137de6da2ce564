"""`python -m ragjax.chat` runs `ragjax.commands.chat`."""

from ragjax.commands.chat import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
