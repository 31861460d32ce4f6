"""Recipes (recipes.py) give the results of Triton's interpreter for all data, not only for that of the first use."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.examples import FULL
from tests.kernels.interpreter import INTERPRETED
from tests.kernels.recipes import UFUNCS, Recipes

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs triton, and no GPU")

TYPES = ("int1", "int8", "int32", "int64", "uint8", "uint32", "fp16", "fp32", "fp64", "bf16", "pointer")
SHAPES: tuple[tuple[int, ...], ...] = ((), (4,), (4, 1), (2, 4), (1, 4))
NUMBERS = (0, 3, -2, 300, (1 << 31) + 5, 0.0, -0.0, 0.1, -1.5, 1e-40, 1e300, float("inf"))
NUMPY = {"int1": bool, "fp16": np.float16, "fp32": np.float32, "fp64": np.float64, "bf16": np.uint16}
NUMPY |= {"pointer": np.uint64}


@pytest.fixture(scope="module")
def interpreter() -> Any:
    from triton.runtime import interpreter

    from pdserve.kernels.linear.rms_norm_triton import _rms_norm

    interpreter._patch_lang(_rms_norm.fn)
    return interpreter


class Slow:
    """A method of tensors as the interpreter computes it, and the number of its calls."""

    def __init__(self, interpreter: Any, name: str) -> None:
        semantic = interpreter.interpreter_semantic
        compare = {"lt": "less_than", "le": "less_equal", "gt": "greater_than", "ge": "greater_equal"}
        compare |= {"eq": "equal", "ne": "not_equal"}
        bare = name.strip("_")
        if bare in compare:
            self._call: Callable[..., Any] = lambda left, right: getattr(semantic, compare[bare])(
                left, semantic.to_tensor(right)
            )
        elif bare in ("add", "sub", "mul"):
            self._call = lambda left, right: getattr(semantic, bare)(left, right, True)
        else:
            self._call = getattr(semantic, {"and": "and_", "or": "or_", "to": "cast"}.get(bare, bare))
        self.calls = 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self._call(*args)


def make_tensor(interpreter: Any, name: str, shape: tuple[int, ...], seed: int, *, special: bool = False) -> Any:
    """With `special`, floats include a subnormal and -0.0."""
    language = interpreter.tl
    scalar = language.pointer_type(language.float32) if name == "pointer" else language.dtype(name)
    data: Any = np.random.default_rng(seed).integers(0, 100, shape or (1,))
    if name.startswith(("int", "fp")) and name != "int1":
        data = data - 50
    if name == "int1":
        data = data % 2 == 0
    elif name.startswith("fp"):
        data = data / 4
        if special:
            data.flat[:2] = (1e-40, -0.0)[: data.size]
    data = data.astype(NUMPY.get(name, name))
    kind = language.block_type(scalar, list(shape)) if shape else scalar
    return language.tensor(interpreter.TensorHandle(data, scalar), kind)


def describe(tensor: Any) -> tuple[Any, ...]:
    data, sizes = tensor.handle.data, [size.value for size in tensor.shape]
    return data.dtype, data.shape, data.tobytes(), tensor.handle.dtype.name, tensor.type.name, sizes, tensor.numel.value


def results(call: Any, *operands: Any) -> Any:
    with np.errstate(all="ignore"):
        try:
            return describe(call(*operands))
        except Exception as error:
            return type(error)


@pytest.mark.parametrize("name", UFUNCS if FULL else ["__add__", "__truediv__", "__lt__", "__and__"])
def test_operators_equal_those_of_the_interpreter(interpreter: Any, name: str) -> None:
    """Also for operands without a recipe. The four default operators differ in their type promotion."""
    slow = Slow(interpreter, name)
    fast = Recipes(interpreter).member(name, slow)
    seeds = itertools.count()

    def operand(kind: str, shape: tuple[int, ...], special: bool) -> Any:
        return make_tensor(interpreter, kind, shape, next(seeds), special=special)

    for left, right in itertools.product(TYPES, TYPES):
        usual = (left, right) in (("int32", "int32"), ("pointer", "int32"))
        for shapes in itertools.product(SHAPES, SHAPES) if usual or FULL else [((4, 1), (2, 4)), ((), (4,))]:
            for again in (False, True):
                operands = operand(left, shapes[0], again), operand(right, shapes[1], again)
                assert results(fast, *operands) == results(slow, *operands), (left, right, shapes)
    for left, shape in itertools.product(TYPES, SHAPES if FULL else [(), (2, 4)]):
        for number, again in itertools.product(NUMBERS, (False, True)):
            operands = operand(left, shape, again), number
            assert results(fast, *operands) == results(slow, *operands), (left, shape, number)


@pytest.mark.parametrize(
    ("name", "left", "right"),
    [
        ("__add__", "pointer", "int32"),
        ("__add__", "pointer", 8),
        ("__mul__", "int32", "int64"),
        ("__mul__", "fp32", 0.5),
        ("__lt__", "int32", 7),
        ("__and__", "int1", "int1"),
    ],
)
def test_usual_operands_have_a_recipe(interpreter: Any, name: str, left: str, right: Any) -> None:
    slow = Slow(interpreter, name)
    fast = Recipes(interpreter).member(name, slow)
    for seed in range(3):
        other = make_tensor(interpreter, right, (), seed) if isinstance(right, str) else right
        fast(make_tensor(interpreter, left, (4,), seed), other)
    assert slow.calls == 1


def test_conversions_equal_those_of_the_interpreter(interpreter: Any) -> None:
    slow = Slow(interpreter, "to")
    fast = Recipes(interpreter).member("to", slow)
    for source, target in itertools.product(TYPES, TYPES):
        for seed, shape in itertools.product(range(2), SHAPES):
            x = make_tensor(interpreter, source, shape, seed)
            scalar = make_tensor(interpreter, target, (), 0).dtype
            assert results(fast, x, scalar) == results(slow, x, scalar), (source, target)
    before = slow.calls
    fast(make_tensor(interpreter, "int32", (4,), 5), interpreter.tl.int64)
    assert slow.calls == before


def test_recipe_that_is_wrong_is_not_used(interpreter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(UFUNCS, "__add__", np.subtract)
    slow = Slow(interpreter, "__add__")
    fast = Recipes(interpreter).member("__add__", slow)
    for seed in range(3):
        x, y = make_tensor(interpreter, "int32", (4,), seed), make_tensor(interpreter, "int32", (4,), seed + 9)
        assert describe(fast(x, y)) == describe(slow(x, y))
    assert slow.calls == 6


@pytest.mark.parametrize("kind", ["fp32", "fp16", "int32", "bf16", "int1"])
def test_loads_equal_those_of_the_interpreter(interpreter: Any, kind: str) -> None:
    language, semantic = interpreter.tl, interpreter.interpreter_semantic
    calls = []

    def slow(pointer: Any, mask: Any, other: Any) -> Any:
        calls.append(kind)
        other = None if other is None else semantic.to_tensor(other)
        return semantic.load(pointer, mask, other, (), "", "", "", False)

    fast = Recipes(interpreter).load(slow)
    memory = make_tensor(interpreter, kind, (64,), 1).handle.data
    scalar = language.pointer_type(language.dtype(kind))
    rng = np.random.default_rng(2)
    masks: tuple[Any, ...] = (None, (), (2, 1), (4,), "same")
    for shape, masked, other in itertools.product(SHAPES, masks, (None, 0, 0.0, 3, 2.5)):
        for _ in range(2):
            addresses = memory.ctypes.data + memory.itemsize * rng.integers(0, 64, shape or (1,)).astype(np.uint64)
            pointer = language.tensor(
                interpreter.TensorHandle(addresses, scalar),
                language.block_type(scalar, list(shape)) if shape else scalar,
            )
            mask = None
            if masked is not None:
                sizes = shape if masked == "same" else masked
                mask = make_tensor(interpreter, "int1", sizes, int(rng.integers(100)))
            arguments = pointer, mask, other
            assert results(fast, *arguments) == results(slow, *arguments), (shape, masked, other)
    calls.clear()
    results(fast, pointer, mask, 0)
    assert calls == ([kind] if kind == "int1" else []), "loads of booleans have no recipe"
