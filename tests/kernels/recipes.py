"""Operators of Triton's interpreter, looked up by the types of their operands.

For every `a + b` the interpreter decides again how types are promoted and shapes broadcast, which takes many times as
long as numpy's addition. Here the first use of an operator with operands of certain types runs the interpreter, and
numpy on the same data. If both give the same bytes, a recipe is stored: later uses with these types run only numpy. All
other uses run the interpreter.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

SIGNED = frozenset({"int8", "int16", "int32", "int64"})
UNSIGNED = frozenset({"uint8", "uint16", "uint32", "uint64"})
FLOATS = frozenset({"fp16", "fp32", "fp64"})
PLAIN = SIGNED | UNSIGNED | FLOATS | {"int1"}
"""Scalar types that numpy has. The interpreter stores bfloat16 and fp8 as integers."""
UFUNCS: dict[str, Any] = {
    "__add__": np.add,
    "__sub__": np.subtract,
    "__mul__": np.multiply,
    "__truediv__": np.divide,
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
    "__and__": np.bitwise_and,
    "__or__": np.bitwise_or,
}
MIRRORED = {"__radd__": "__add__", "__rmul__": "__mul__"}
"""Commutative operators, called on the right operand."""
WHOLE = slice(None)
IGNORED_BY_LOAD = {"cache_modifier", "eviction_policy", "volatile"}
"""Options that the interpreter ignores."""
TINY, HUGE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
"""Finite constants outside this range, except 0, are float64 in the interpreter."""


class Recipes:
    """Recipes for the methods of tensors. `slow` is the method of the interpreter."""

    def __init__(self, interpreter: Any) -> None:
        self._core = interpreter.tl.core
        self._handle_class = interpreter.TensorHandle
        self._numpy_type: Callable[[Any], Any] = interpreter._get_np_dtype
        self._load = interpreter._interpreter.load

    def member(self, name: str, slow: Any) -> Any:
        """A replacement for the method `name` of tensors that uses recipes; `slow` itself if there are none for it."""
        ufunc = UFUNCS.get(MIRRORED.get(name, name))
        if ufunc is not None:
            return self._operator(ufunc, slow, pointers=MIRRORED.get(name, name) == "__add__")
        return {"__getitem__": self._expand, "to": self._cast}.get(name, lambda same: same)(slow)

    def _operator(self, ufunc: Any, slow: Any, *, pointers: bool) -> Any:
        recipes: dict[Any, Any] = {}
        tensor, constexpr, make = self._core.tensor, self._core.constexpr, self._make

        def of_tensors(left: Any, right: Any) -> Any:
            ours, theirs = left.handle.data, right.handle.data
            key = left.type.name, left.handle.dtype.name, ours.dtype.char, right.type.name, theirs.dtype.char
            recipe = recipes.get(key)
            if recipe is None:
                result = slow(left, right)
                run = self._between(ufunc, left, right, pointers)
                recipes[key] = self._checked(run and run(ours, theirs), result) and (run, *_description(result))
                return result
            if not recipe:
                return slow(left, right)
            run, *described = recipe
            return make(run(ours, theirs), *described)

        def operator(left: Any, right: Any, **_semantic: Any) -> Any:
            kind = type(right)
            if kind is tensor:
                return of_tensors(left, right)
            if kind is constexpr:
                right = right.value
                kind = type(right)
            if kind is not int and kind is not float:
                return slow(left, right)
            ours = left.handle.data
            key = left.type.name, left.handle.dtype.name, ours.dtype.char, kind, right
            recipe = recipes.get(key)
            if recipe is None:
                result = slow(left, right)
                run, constant = self._with_number(ufunc, left, right, pointers)
                recipes[key] = self._checked(run and run(ours, constant), result) and (
                    run,
                    constant,
                    *_description(result),
                )
                return result
            if not recipe:
                return slow(left, right)
            run, constant, *described = recipe
            return make(run(ours, constant), *described)

        return operator

    def _between(self, ufunc: Any, left: Any, right: Any, pointers: bool) -> Any:
        """The numpy function of the data of two tensors; None if numpy promotes their types differently."""
        if left.dtype.is_ptr():
            width = _element_bytes(left)
            if not pointers or right.dtype.name not in SIGNED:
                return None
            return lambda addresses, offsets: addresses + width * offsets.astype(np.uint64)
        names = {left.dtype.name, right.dtype.name}
        same = len(names) == 1 and names <= PLAIN
        return ufunc if same or names <= SIGNED or names <= FLOATS else None

    def _with_number(self, ufunc: Any, left: Any, number: float, pointers: bool) -> tuple[Any, Any]:
        """The numpy function of the data and the constant; None if the number does not take the tensor's type."""
        name, whole = left.dtype.name, type(number) is int
        if whole and abs(number) < 1 << 31:
            if left.dtype.is_ptr() and pointers:
                return np.add, np.array([number], np.int32).astype(np.uint64) * np.uint64(_element_bytes(left))
            if name in ("int32", "int64", "fp32"):
                return ufunc, np.array([number], self._numpy_type(left.dtype))
        elif not whole and name == "fp32" and (not np.isfinite(number) or not number or TINY <= abs(number) <= HUGE):
            return ufunc, np.array([number or 0], np.float32)  # -0.0 is 0 in the interpreter
        return None, None

    def _expand(self, slow: Any) -> Any:
        """`x[:, None]` and the like."""
        recipes: dict[Any, Any] = {}

        def expand(x: Any, index: Any) -> Any:
            if type(index) is not tuple or not all(part is None or part == WHOLE for part in index):
                return slow(x, index)
            data = x.handle.data
            key = x.type.name, data.dtype.char, *(part is None for part in index)
            recipe = recipes.get(key)
            if recipe is None:
                result = slow(x, index)
                recipes[key] = x.type.is_block() and self._checked(data[index], result) and _description(result)
                return result
            return self._make(data[index], *recipe) if recipe else slow(x, index)

        return expand

    def _cast(self, slow: Any) -> Any:
        recipes: dict[Any, Any] = {}

        def to(x: Any, dtype: Any, *options: Any, **more: Any) -> Any:
            if type(dtype) is self._core.constexpr:
                dtype = dtype.value
            if options or more or type(dtype) is not self._core.dtype:
                return slow(x, dtype, *options, **more)
            if x.dtype is dtype:
                return x
            data = x.handle.data
            key = x.type.name, data.dtype.char, dtype.name
            recipe = recipes.get(key)
            if recipe is None:
                result = slow(x, dtype)
                converts = _is_astype(x.dtype.name, dtype.name)
                target = self._numpy_type(dtype) if converts else None
                recipes[key] = (
                    converts and self._checked(data.astype(target), result) and (target, *_description(result))
                )
                return result
            return self._make(data.astype(recipe[0]), *recipe[1:]) if recipe else slow(x, dtype)

        return to

    def load(self, slow: Any) -> Any:
        """`tl.load` of addresses with a mask or without."""
        recipes: dict[Any, Any] = {}
        tensor, constexpr = self._core.tensor, self._core.constexpr

        def load(pointer: Any, mask: Any = None, other: Any = None, *rest: Any, **options: Any) -> Any:
            if type(other) is constexpr:
                other = other.value
            if (
                type(pointer) is not tensor
                or (mask is not None and type(mask) is not tensor)
                or (other is not None and type(other) is not int and type(other) is not float)
                or rest
                or not options.keys() <= IGNORED_BY_LOAD
            ):
                return slow(pointer, mask, other, *rest, **options)
            addresses = pointer.handle.data
            key: tuple[Any, ...] = (pointer.type.name, other)
            selected = None
            if mask is not None:
                selected = mask.handle.data
                key += mask.type.name, selected.dtype.char
            recipe = recipes.get(key)
            if recipe is None:
                result = slow(pointer, mask, other, **options)
                run = self._loads(pointer, mask, other, result)
                same = self._checked(run and run(addresses, selected), result)
                recipes[key] = same and (run, *_description(result))
                return result
            if not recipe:
                return slow(pointer, mask, other, **options)
            run, *described = recipe
            return self._make(run(addresses, selected), *described)

        return load

    def _loads(self, pointer: Any, mask: Any, other: Any, result: Any) -> Any:
        element = pointer.dtype.element_ty
        if element.is_block() or element.name == "int1" or (mask is not None and mask.handle.data.dtype != bool):
            return None
        if other and not (element.name == "fp32" or (element.name in ("int32", "int64") and type(other) is int)):
            return None
        numpy_type, shape = self._numpy_type(element), result.handle.data.shape
        fill = np.full(shape, other or 0, numpy_type)
        all_selected = np.ones(shape, bool)
        fill.flags.writeable = all_selected.flags.writeable = False
        load = self._load

        def run(addresses: Any, selected: Any) -> Any:
            if selected is None:
                selected = all_selected
            elif selected.shape != shape:
                selected = np.broadcast_to(selected, shape)
            if addresses.shape != shape:
                addresses = np.broadcast_to(addresses, shape)
            return load(addresses, selected, fill, numpy_type)

        return run

    def _checked(self, found: Any, result: Any) -> bool:
        """Whether numpy gave the result of the interpreter. Otherwise there is no recipe."""
        if found is None:
            return False
        wanted = result.handle.data
        same: bool = (found.dtype, found.shape) == (wanted.dtype, wanted.shape) and found.tobytes() == wanted.tobytes()
        return same

    def _make(self, data: Any, handle_type: Any, type_: Any, dtype: Any, shape: Any, numel: Any) -> Any:
        handle = self._handle_class.__new__(self._handle_class)
        handle.data, handle.dtype, handle.attr = data, handle_type, {}
        made = self._core.tensor.__new__(self._core.tensor)
        made.handle, made.type, made.dtype, made.shape, made.numel = handle, type_, dtype, shape, numel
        return made


def _description(result: Any) -> tuple[Any, ...]:
    """The types and the shape, which all results of a recipe share."""
    return result.handle.dtype, result.type, result.dtype, result.shape, result.numel


def _element_bytes(pointer: Any) -> int:
    return int(max(1, pointer.dtype.element_ty.primitive_bitwidth // 8))


def _is_astype(source: str, target: str) -> bool:
    """Whether the interpreter converts these types by one conversion of numpy."""
    if target not in SIGNED | UNSIGNED | FLOATS:
        return False
    return source in SIGNED | UNSIGNED | {"int1", "fp32", "fp64"} or (source, target) == ("fp16", "fp32")
