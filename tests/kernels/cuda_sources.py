"""Checks launches of csrc/ kernels against their declarations: nothing else checks them, arguments are bare numbers."""

import functools
import re
from types import SimpleNamespace
from typing import Any

import torch

from pdserve.kernels.backends.nvrtc import SOURCE_FOLDER

_NUMBERS_END = 1 << 32
"""Every size, stride or float in a launch of a test is below this, and so is no address, unless the heap of this Python
begins there.
"""
_FIRST_ADDRESS = min(_NUMBERS_END, torch.empty(1).data_ptr() >> 1)


@functools.cache
def parameters(source: str, name: str) -> tuple[str, ...]:
    """The parameter types of kernel `name`, without qualifiers."""
    code = (SOURCE_FOLDER / source).read_text(encoding="utf-8")
    found = re.search(rf'extern "C" __global__[^;{{}}]*?\b{name}\(([^)]*)\)', code)
    assert found is not None, f"{source} has no kernel {name}"
    declared = [re.sub(r"\b(const|__restrict__)\b", "", part) for part in found[1].split(",")]
    return tuple(re.sub(r"\s*\w+\s*$", "", part).strip() for part in declared)


def check_launch(source: str, name: str, args: tuple[Any, ...]) -> None:
    """Raise AssertionError unless the kernel takes these arguments, addresses and 64-bit integers, in this order."""
    taken = parameters(source, name)
    assert len(args) == len(taken), f"{name} takes {len(taken)} arguments, not {len(args)}"
    for number, (arg, kind) in enumerate(zip(args, taken, strict=True)):
        assert type(arg) is int, f"argument {number} of {name} is {arg!r}: only an int has the width of a parameter"
        assert kind.endswith("*") or kind == "long long", f"parameter {number} of {name} is {kind}"
        fits = arg >= _FIRST_ADDRESS if kind.endswith("*") else arg < _NUMBERS_END
        assert fits, f"argument {number} of {name}, {kind}, is {arg}"


def load_kernel(source: str, name: str, *_args: Any, **_options: Any) -> Any:
    """Replaces load_kernel of nvrtc.py: checks launches, and runs nothing."""

    def launch(*args: Any, blocks: int, threads: int, shared_bytes: int = 0, overlap_previous: bool = False) -> None:
        assert blocks > 0
        assert 0 < threads <= 1024
        assert 0 <= shared_bytes <= 227 << 10
        assert isinstance(overlap_previous, bool)
        check_launch(source, name, args)

    return SimpleNamespace(launch=launch)
