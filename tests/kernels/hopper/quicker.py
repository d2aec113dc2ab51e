# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter without what it makes anew for each operation: the same numbers in a third of the time.

It spends its time on types, not on numbers: a block type and its shape for each result, a table of dtypes for each look at one,
an overflow check whose outcome it drops, and the whole language patched for each launch. What is made once here is what Triton
makes; anything out of the ordinary goes to Triton's own function.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

__all__ = ["install"]

_unwrap = core._unwrap_if_constexpr
_NUMBERS = (int, float)
_PLAIN = frozenset({int, float, bool, str, type(None), tl.dtype, tl.tensor})
_tuple = core.tuple.__init__
_broadcast = TritonSemantic.broadcast_impl_value
_checking = TritonSemantic.binary_op_type_checking_impl
_full = TritonSemantic.full
_cast = TritonSemantic.cast
_np_dtype = interpreter._get_np_dtype
_patch_lang = interpreter._patch_lang

_shapes: dict[tuple[Any, ...], dict[str, Any]] = {}
_constants: dict[tuple[Any, ...], Any] = {}
_pairs: dict[tuple[int, int], Any] = {}
_dtypes: dict[str, np.dtype[Any]] = {}
_patched: dict[tuple[int, ...], Any] = {}


def _plain(value: Any) -> Any:
    """`_unwrap_if_constexpr`."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    return value.value if kind is core.constexpr else _unwrap(value)


def _typed(self: Any, element_ty: Any, shape: Any) -> None:
    """`block_type.__init__`: one shape for all types of it, and a name when somebody asks."""
    key = tuple([s.value if type(s) is core.constexpr else s for s in shape])
    if (made := _shapes.get(key)) is None:
        if not key:
            raise TypeError("0d block_type is forbidden")
        numel = validate_block_shape(list(key))
        of_tensor = core.tuple([core.constexpr(s) for s in key]), core.constexpr(numel)
        _shapes[key] = made = {"shape": core.tuple(key), "numel": numel, "of_tensor": of_tensor}
    self.__dict__.update(made)
    self.element_ty = element_ty


_SCALAR = (core.tuple([]), core.constexpr(1))


def _made(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - called by name
    """`tensor.__init__`."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.of_tensor if type.is_block() else _SCALAR


def _values(self: Any, args: Any, type: Any = None) -> None:  # noqa: A002 - called by name
    """`tuple.__init__`, which finds the types of its values when somebody asks."""
    if type is not None:
        _tuple(self, args, type)
    else:
        self.values = list(args)


def _types(self: Any) -> Any:
    if (found := self.__dict__.get("_type")) is None:
        self._type = found = core._type_for_tuple_values(self.values)
    return found


def _in_numpy(tt_dtype: Any) -> np.dtype[Any]:
    """`_get_np_dtype`."""
    scalar = tt_dtype.scalar
    if (found := _dtypes.get(scalar.name)) is None:
        _dtypes[scalar.name] = found = _np_dtype(scalar)
    return found


def _alike(self: Any, lhs: Any, rhs: Any) -> Any:
    """`broadcast_impl_value` for two of one shape; equal shapes are one object."""
    a, b = lhs.type, rhs.type
    if a.shape is b.shape if a.is_block() and b.is_block() else a.is_block() == b.is_block():
        return lhs, rhs
    return _broadcast(self, lhs, rhs)


def _shared(a: Any, b: Any) -> Any:
    """The shape of two blocks side by side, as one of `_shapes`."""
    if (found := _pairs.get((id(a), id(b)))) is None:
        if len(a) != len(b) or any(x != y and 1 not in (x, y) for x, y in zip(a, b, strict=True)):
            return None
        found = tl.block_type(tl.int1, [max(x, y) for x, y in zip(a, b, strict=True)]).shape
        _pairs[id(a), id(b)] = found
    return found


def _together(lhs: Any, rhs: Any) -> Any:
    """Two operands as of one shape; the numbers of a smaller one stay as they are, since numpy stretches them."""
    a, b = lhs.type, rhs.type
    if a.is_block() and b.is_block():
        if a.shape is b.shape:
            return lhs, rhs
        if (shape := _shared(a.shape, b.shape)) is None:
            return _broadcast(interpreter.interpreter_semantic, lhs, rhs)
    elif a.is_block() or b.is_block():
        shape = a.shape if a.is_block() else b.shape
    else:
        return lhs, rhs
    if not a.is_block() or a.shape is not shape:
        lhs = tl.tensor(lhs.handle, tl.block_type(a.scalar, shape))
    if not b.is_block() or b.shape is not shape:
        rhs = tl.tensor(rhs.handle, tl.block_type(b.scalar, shape))
    return lhs, rhs


def _checked(
    self: Any,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> Any:
    """`binary_op_type_checking_impl`: two of one number's type stay as they are, a constant beside a tensor is made once."""
    left, right = type(lhs) is tl.tensor, type(rhs) is tl.tensor
    if left and right:
        a, b = lhs.dtype, rhs.dtype
        if not (same := a is b and not div_or_mod) or a.is_ptr():
            if a.is_ptr() or b.is_ptr():
                self.check_ptr_type_impl(a, b, allow_lhs_ptr)
                self.check_ptr_type_impl(b, a, allow_rhs_ptr)
            elif arithmetic_check and not same:
                to = self.computation_type_impl(a, False, b, False, div_or_mod)
                lhs, rhs = self.cast(lhs, to), self.cast(rhs, to)
        return _together(lhs, rhs)
    if left or right:
        block, value = (lhs, rhs) if left else (rhs, lhs)
        # a zero may have either sign, and a NaN is not itself
        if type(value) in _NUMBERS and value and value == value and not block.dtype.is_ptr():
            shape = id(block.shape) if block.type.is_block() else 0
            key = (value, type(value), left, block.dtype.name, shape, arithmetic_check, div_or_mod)
            if (made := _constants.get(key)) is None:
                found = _checking(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
                constant, other = found if right else found[::-1]
                _constants[key] = constant, other.dtype
                return found
            constant, dtype = made
            block = self.cast(block, dtype)
            return (block, constant) if left else (constant, block)
    return _checking(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


def _fitting(array: Any, tl_dtype: Any) -> bool:
    """`_validate_np_data_size`."""
    return tl_dtype.is_ptr() or array.itemsize * 8 <= max(8, tl_dtype.primitive_bitwidth)


def _splat(self: Any, ret_ty: Any, arg: Any) -> Any:
    """`create_splat`."""
    data = np.empty(ret_ty.shape.values, arg.data.dtype)
    data.fill(arg.data.item())
    return interpreter.TensorHandle(data, arg.dtype.scalar)


def _filled(self: Any, shape: Any, value: Any, dtype: Any) -> Any:
    """`full`: a constant is made once."""
    if type(value) not in _NUMBERS:
        return _full(self, shape, value, dtype)
    key = (repr(value), dtype.name, *[_plain(s) for s in shape])
    if (found := _constants.get(key)) is None:
        _constants[key] = found = _full(self, shape, value, dtype)
    return found


def _to(self: Any, x: Any, dst_ty: Any, *args: Any, **kwargs: Any) -> Any:
    """`cast`."""
    return x if x.type.scalar is dst_ty.scalar else _cast(self, x, dst_ty, *args, **kwargs)


def _language(fn: Any) -> Any:
    """`_patch_lang`, which nobody undoes: nothing else of this process needs the language as it was."""
    key = tuple(sorted({id(v) for v in fn.__globals__.values() if v is tl or v is core}))
    if key not in _patched:
        _patched[key] = _patch_lang(fn)
        _patched[key].restore = lambda: None
    return _patched[key]


def _member(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """`_patch_attr`."""
    semantic = interpreter.interpreter_semantic

    def called(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return member(*args, **kwargs)

    scope.set_attr(obj, name, called)


def _itself(self: Any, _builder: Any) -> Any:
    """`block_type.to_ir`: the interpreter's types are the language's."""
    return self


def install() -> None:
    """Put all of it in Triton's place, in a process that only interprets."""
    core._unwrap_if_constexpr = _plain
    tl.block_type.__init__ = _typed
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    tl.block_type.to_ir = _itself
    tl.tensor.__init__ = _made
    core.tuple.__init__ = _values
    core.tuple.type = property(_types, lambda self, value: setattr(self, "_type", value))
    TritonSemantic.broadcast_impl_value = _alike
    TritonSemantic.binary_op_type_checking_impl = _checked
    TritonSemantic.full = _filled
    TritonSemantic.cast = _to
    interpreter._get_np_dtype = _in_numpy
    interpreter._patch_lang = _language
    interpreter._patch_attr = _member
    interpreter._validate_np_data_size = _fitting
    interpreter.InterpreterBuilder.create_splat = _splat
    builder = interpreter.interpreter_builder
    # its outcome is an assertion, which the interpreter makes in debugging alone
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
