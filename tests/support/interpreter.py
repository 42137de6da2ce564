"""Runs a raw Triton program on the CPU, by Triton's own interpreter over NumPy arrays; needs triton.

`launch` interprets the very function that a GPU would be given. Triton means this to be chosen for a whole process,
before it is imported; here it holds for a call, so that the same process can also compile.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int32": "i32"}


class Pointer:
    """A NumPy array as a program's argument."""

    def __init__(self, array: np.ndarray) -> None:
        assert array.flags.c_contiguous
        self.array = array
        self.dtype = TYPES[array.dtype.name]

    def data_ptr(self) -> int:
        return self.array.ctypes.data


class _InPlace(interpreter.GridExecutor):
    """Leaves arguments where they are: the original copies PyTorch tensors to the host and back."""

    def _init_args_hst(self, args_dev: Any, kwargs: Any) -> tuple[Any, Any]:
        return args_dev, kwargs

    def _restore_args_dev(self, *_: Any) -> None:
        pass


def _float(handle: Any) -> np.ndarray:
    return handle.data.view(ml_dtypes.bfloat16).astype(np.float32) if handle.dtype == core.bfloat16 else handle.data


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    product = np.matmul(_float(a), _float(b), dtype=np.float32) + d.data
    return interpreter.TensorHandle(product, d.dtype.scalar)


@contextmanager
def _mended() -> Iterator[None]:
    """Interprets what programs call, and what triton 3.6 lacks: bfloat16 products, loop bounds on NumPy 2.5."""
    original, patch_lang = interpreter._patch_lang_tensor, interpreter._patch_lang
    scopes: list[Any] = []  # undone last first, and all: those of called functions would stay, and spoil compilation

    def patch_and_keep(function: Any) -> Any:
        scopes.append(patch_lang(function))
        return interpreter._LangPatchScope()

    def patch_tensor(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    with (
        patch.object(interpreter, "_patch_lang_tensor", patch_tensor),
        patch.object(interpreter, "_patch_lang", patch_and_keep),
        patch.object(
            JITFunction, "__call__", lambda self, *args, **kw: interpreter.InterpretedFunction(self.fn)(*args, **kw)
        ),
        patch.object(interpreter.InterpreterBuilder, "create_dot", _dot),
        np.errstate(all="ignore"),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "All-NaN slice encountered", RuntimeWarning)
        try:
            yield
        finally:
            while scopes:
                scopes.pop().restore()


def launch(program: JITFunction, grid: tuple[int, ...], arrays: Sequence[np.ndarray], **constants: Any) -> None:
    """Run a program over its grid; arrays are read and written in place."""
    with _mended():
        function = interpreter.InterpretedFunction(program.fn)
        _InPlace(function.rewrite(), function.arg_names, grid)(*map(Pointer, arrays), **constants)
