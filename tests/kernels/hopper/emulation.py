# SPDX-License-Identifier: Apache-2.0
"""Makes Triton's interpreter round as Hopper does; import it first, in a process of its own.

Triton decides when a kernel is decorated whether it is interpreted.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import quicker  # type: ignore[import-not-found]
import torch
import triton.language as tl
from triton.runtime import interpreter

from isoexec.kernels.hopper import arithmetic

quicker.install()


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """A tensor-core dot: 16 products at a time, exact, added to the accumulator with one rounding."""

    def wide(h: Any) -> Any:
        assert h.dtype.scalar == tl.bfloat16, h.dtype
        return (h.data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)

    x, w, acc = wide(a), wide(b), d.data.astype(np.float32)
    for k in range(0, x.shape[-1], 16):
        acc = (x[..., k : k + 16] @ w[..., k : k + 16, :] + acc.astype(np.float64)).astype(np.float32)
    return interpreter.TensorHandle(acc, d.dtype.scalar)


_cast = interpreter.InterpreterBuilder.cast_impl


def _exactly(self: Any, src: Any, dst_type: Any) -> Any:
    """Between fp32 and bf16 as a GPU does it: to nearest even, and subnormals as they are; the interpreter cuts and flushes."""
    kinds = src.dtype.scalar, dst_type.scalar
    if kinds == (tl.float32, tl.bfloat16):
        rounded = torch.from_numpy(np.ascontiguousarray(src.data, dtype=np.float32)).bfloat16()
        return interpreter.TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)
    if kinds == (tl.bfloat16, tl.float32):
        wide = (src.data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
        return interpreter.TensorHandle(wide, tl.float32)
    return _cast(self, src, dst_type)


_reduce = interpreter.ReduceOps.apply_impl


def _largest(self: Any, given: Any) -> Any:
    """The interpreter knows Triton's own maximum; another one it combines element by element in Python."""
    if self.combine_fn is not arithmetic._larger:
        return _reduce(self, given)
    found = np.maximum.reduce(given[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
    return self.to_tensor(found, given[0].dtype)


interpreter.ReduceOps.apply_impl = _largest
interpreter.InterpreterBuilder.create_dot = _dot
interpreter.InterpreterBuilder.cast_impl = _exactly


_patched: set[str] = set()


def _called(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A function that a kernel calls: the language is already patched for the kernel, and looking again is most of the time."""
    if (module := self.fn.__module__).startswith("triton.") and module not in _patched:
        _patched.add(module)  # Triton's own functions see the language by another name; that stays patched
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **kwargs)


interpreter.InterpretedFunction.__call__ = _called
