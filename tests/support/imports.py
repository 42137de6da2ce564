"""Which modules an interpreter can import that lacks some packages."""

from __future__ import annotations

import subprocess
import sys

from tests.support.devices import ROOT

HEAVY = {"faiss", "gguf", "fastapi", "uvicorn", "httpx", "prometheus_client"}
WITHOUT = """
import importlib, importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is imported, and this module must do without", name=name)

sys.meta_path.insert(0, Absent())
for module in {modules!r}:
    importlib.import_module(module)
"""


def import_without(blocked: set[str], modules: list[str]) -> subprocess.CompletedProcess[str]:
    """Import the modules in a fresh interpreter that lacks the packages `blocked`."""
    program = WITHOUT.format(blocked=blocked, modules=modules)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
