"""Without a GPU, Triton kernels run in Triton's interpreter. Import this before any module that imports Triton."""

import dataclasses
import functools
import importlib.util
import inspect
import os
import types
from typing import Any

import numpy as np
import torch

from tests.kernels.recipes import Recipes

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None


def _cache_lookups() -> None:
    """Cache what the interpreter computes again for every kernel call and operation, which is most of its time: the
    functions of the language that it replaces, types, and shapes of tensors.
    """
    from triton.runtime import interpreter

    language, numpy_type = interpreter.tl, interpreter._get_np_dtype
    numpy_types: dict[str, Any] = {}
    recipes = Recipes(interpreter)

    @functools.cache
    def builtins_of(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if language.core.is_builtin(member)]

    def patch_builtin(package: Any, *scope: Any) -> None:
        for name in builtins_of(package):
            member = getattr(package, name)
            if language.core.is_builtin(member):  # not replaced yet
                interpreter._patch_attr(package, name, member, *scope)

    def patch_attr(package: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
        def with_semantic(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return member(*args, **kwargs)

        if package is language.core.tensor:
            scope.set_attr(package, name, recipes.member(name, with_semantic))
        elif name == "load" and package in (language, language.core):
            scope.set_attr(package, name, recipes.load(with_semantic))
        else:
            scope.set_attr(package, name, with_semantic)

    def get_np_dtype(dtype: Any) -> Any:
        found = numpy_types.get(dtype.name)
        if found is None:
            found = numpy_types[dtype.name] = numpy_type(dtype)
        return found

    interpreter._patch_builtin = patch_builtin
    interpreter._get_np_dtype = get_np_dtype
    if not hasattr(interpreter, "_LangPatchScope"):
        return  # before Triton 3.7
    interpreter._patch_attr = patch_attr
    # the interpreter computes overflow checks, but asserts them only with `debug`
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _patch_once(interpreter)
    _cache_signatures(interpreter)
    _cache_shapes(language.core)
    _add_shortcuts(language.core, type(interpreter.interpreter_semantic))


def _multiply_bfloat16() -> None:
    """Multiply matrices of bfloat16 in float32. The interpreter would multiply their bits as integers."""
    from triton.runtime import interpreter

    language, builder = interpreter.tl, interpreter.interpreter_builder
    create_dot = builder.create_dot

    def widened(operand: Any) -> Any:
        if operand.dtype != language.bfloat16:
            return operand
        bits = operand.data.astype(np.uint32) << np.uint32(16)
        return interpreter.TensorHandle(bits.view(np.float32), language.float32)

    builder.create_dot = lambda left, right, *rest: create_dot(widened(left), widened(right), *rest)


def _patch_once(interpreter: Any) -> None:
    """Patch the language once and never restore it: nothing in this process compiles kernels."""
    patch_lang, scope_class = interpreter._patch_lang, interpreter._LangPatchScope
    patched: set[str] = set()
    functions: set[Any] = set()

    def patch_once(function: Any) -> Any:
        if function not in functions:
            functions.add(function)
            names = {value.__name__ for value in function.__globals__.values() if inspect.ismodule(value)}
            languages = names & {"triton.language", "triton.language.core"}
            if not languages or not languages <= patched:
                patch_lang(function)
                patched.update(languages)
        return scope_class()  # has nothing to restore

    interpreter._patch_lang = patch_once


def _cache_signatures(interpreter: Any) -> None:
    """Look up the parameters of a kernel once, not twice per launch, and the type of an argument once per dtype."""
    fast = types.ModuleType("inspect")
    vars(fast).update(vars(inspect))
    specifications = functools.cache(inspect.getfullargspec)

    def getcallargs(function: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        specification = specifications(function)
        names = specification.args
        given = dict(zip(names, args, strict=False)) | kwargs
        if len(given) != len(args) + len(kwargs) or given.keys() != set(names):
            return inspect.getcallargs(function, *args, **kwargs)  # has defaults, or raises
        return {name: given[name] for name in names}

    vars(fast).update(getfullargspec=specifications, getcallargs=getcallargs)
    interpreter.inspect = fast
    interpreter.tl.str_to_ty = functools.cache(interpreter.tl.str_to_ty)


def _cache_shapes(core: Any) -> None:
    """Block types and tensors of the same shape share the objects that describe it; nothing changes them."""
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    blocks: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def block_init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if type(size) is core.constexpr else size for size in shape])
        known = blocks.get(sizes)
        if known is None:
            make_block(self, element_ty, shape)
            blocks[sizes] = self.shape, self.numel, str(self.shape)
            return
        self.element_ty = element_ty
        self.shape, self.numel, text = known
        self.name = f"<{text}, {element_ty}>"

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        known = tensors.get(sizes)
        if known is None:
            make_tensor(self, handle, type)
            tensors[sizes] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known

    core.block_type.__init__ = block_init
    core.tensor.__init__ = tensor_init


def _add_shortcuts(core: Any, semantic: Any) -> None:
    """Shortcuts for the usual case: the same type, the same shape, a value that needs no unwrapping."""
    unwrap, types_equal, broadcast = core._unwrap_if_constexpr, core.dtype.__eq__, semantic.broadcast_impl_value
    check_types, make_constant = semantic.binary_op_type_checking_impl, semantic.scalar_constant
    constants: dict[tuple[type, Any, str], Any] = {}

    def unwrap_if_constexpr(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        if kind is int or kind is core.tensor or kind is core.dtype:
            return value
        return unwrap(value)

    def equal(self: Any, other: Any) -> bool:
        return self is other or bool(types_equal(self, other))

    def broadcast_impl_value(self: Any, left: Any, right: Any) -> Any:
        if left.type.is_block():
            if right.type.is_block() and left.type.shape.values == right.type.shape.values:
                return left, right
        elif not right.type.is_block():
            return left, right
        return broadcast(self, left, right)

    def check_operands(
        self: Any, left: Any, right: Any, left_ptr: bool = False, right_ptr: bool = False, *rest: bool, **options: bool
    ) -> Any:
        if type(left) is core.tensor and type(right) is core.tensor and not rest and not options:
            kind = left.type.scalar
            if kind is right.type.scalar and not kind.is_ptr():
                return self.broadcast_impl_value(left, right)
        return check_types(self, left, right, left_ptr, right_ptr, *rest, **options)

    def scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
        key = type(value), value, dtype.name
        known = constants.get(key)
        if known is None:
            known = make_constant(self, value, dtype)
            known.handle.data.flags.writeable = False  # it is shared
            if value == value and value != 0:  # a key with NaN is never found, and 0.0 equals -0.0
                constants[key] = known
        return known

    core._unwrap_if_constexpr = unwrap_if_constexpr
    semantic.binary_op_type_checking_impl = check_operands
    semantic.scalar_constant = scalar_constant
    core.dtype.__eq__ = equal
    semantic.broadcast_impl_value = broadcast_impl_value


if INTERPRETED:
    _cache_lookups()
    _multiply_bfloat16()
