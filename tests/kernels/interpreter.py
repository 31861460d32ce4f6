"""Without a GPU, Triton kernels run in its interpreter. Import this before any module that imports Triton."""

import functools
import importlib.util
import inspect
import os
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None


def _remember_lookups() -> None:
    """Let the interpreter remember two results that it computes again for every kernel call and operation: the
    functions of the language that it replaces, and the numpy type of a Triton type. They take a third of its time.
    """
    from triton.runtime import interpreter

    language, numpy_type = interpreter.tl, interpreter._get_np_dtype
    numpy_types: dict[str, Any] = {}

    @functools.cache
    def builtins_of(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if language.core.is_builtin(member)]

    def patch_builtin(package: Any, *scope: Any) -> None:
        for name in builtins_of(package):
            member = getattr(package, name)
            if language.core.is_builtin(member):  # not replaced yet
                interpreter._patch_attr(package, name, member, *scope)

    def get_np_dtype(dtype: Any) -> Any:
        found = numpy_types.get(dtype.name)
        if found is None:
            found = numpy_types[dtype.name] = numpy_type(dtype)
        return found

    interpreter._patch_builtin = patch_builtin
    interpreter._get_np_dtype = get_np_dtype


if INTERPRETED:
    _remember_lookups()
