"""`python -m ragjax.reuse.calibrate` runs `ragjax.commands.calibrate`."""

from ragjax.commands.calibrate import main

if __name__ == "__main__":
    raise SystemExit(main())
