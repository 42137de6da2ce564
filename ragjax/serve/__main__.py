"""`python -m ragjax.serve`."""

import sys

NEEDED = ("fastapi", "multipart", "prometheus_client", "pydantic", "starlette", "uvicorn")
"""Packages of the extra `serve` that the command imports."""


def run() -> int:
    """Run the command; returns the exit code."""
    try:
        from ragjax.serve.command import main
    except ModuleNotFoundError as error:
        if error.name not in NEEDED:
            raise
        reason = f"the server needs the package {error.name}: pip install '.[serve]' in ragjax's folder"
        print(f"ragjax.serve: error: {reason}", file=sys.stderr)
        return 2
    return main()


if __name__ == "__main__":
    sys.exit(run())
