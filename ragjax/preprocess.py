"""`python -m ragjax.preprocess` runs `ragjax.commands.preprocess`."""

from ragjax.commands.preprocess import fuse, main, preprocess

__all__ = ["fuse", "main", "preprocess"]

if __name__ == "__main__":
    raise SystemExit(main())
