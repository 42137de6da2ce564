"""Prints the part of a lock, hashes included, that pip's plan of an installation needs: `locked.py PLAN LOCK`."""

import json
import re
import sys
from pathlib import Path


def locked(plan: str, lock: str) -> str:
    """The entries of a lock for the packages that a report of `pip install --dry-run` would install."""
    wanted = {_plain(one["metadata"]["name"]) for one in json.loads(plan)["install"]}
    entries = re.findall(r"^[^\s#].*\\\n(?:    --hash=.*\n)+", lock, re.MULTILINE)
    return "".join(entry for entry in entries if _plain(re.split("[=\\[ ]", entry)[0]) in wanted)


def _plain(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


if __name__ == "__main__":
    print(locked(*(Path(path).read_text() for path in sys.argv[1:])), end="")
