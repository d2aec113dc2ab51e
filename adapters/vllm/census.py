# SPDX-License-Identifier: Apache-2.0
"""Lists the floating-point arithmetic a step of the engine does outside every contract region.

A dispatch mode sees every operator of the steps it watches.  Inside are operators of the ``isoexec`` library, whatever a bound
object runs while its region is marked, and the engine's own opaque operators that call into a region (attention).  Copies,
views, gathers, comparisons, widening casts and allocations round nothing and are not arithmetic; nor is integer
work (positions, slots, token ids).  What a kernel of another library does inside one operator is one entry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isoexec.adapters.vllm import state

__all__ = ["Census"]

_MOVES = frozenset(
    """
    _to_copy _unsafe_view alias arange argmax as_strided cat clone constant_pad_nd contiguous copy copy_
    detach embedding empty empty_like empty_strided eq expand fill fill_ full full_like gather ge gt
    index index_put index_put_ index_select le lift_fresh lt masked_fill masked_fill_ masked_select
    max_pool narrow ne new_empty new_empty_strided new_full new_zeros ones ones_like pad permute randint
    random_ repeat reshape resize_ resolve_conj resolve_neg scalar_tensor scatter scatter_ select
    select_scatter set_ slice slice_scatter split split_with_sizes squeeze squeeze_ stack t to topk
    transpose unbind unfold unsafe_split unsqueeze unsqueeze_ view where zero_ zeros zeros_like
    """.split()  # noqa: SIM905  (a hundred quoted words are no easier to read)
)
"""Operators that move or compare values; they round nothing."""
_CASTS = frozenset(("_to_copy", "to", "copy", "copy_"))
"""Of them, those that round when they narrow a dtype."""


def _narrows(result: Any, args: Any) -> bool:
    """Whether a copy or cast went from a floating-point dtype to a narrower one."""
    into = args[0] if args and result is None else result
    sources = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    return isinstance(into, torch.Tensor) and any(t.element_size() > into.element_size() for t in sources)


class _Watch(TorchDispatchMode):
    def __init__(self, census: Census) -> None:
        super().__init__()
        self._census = census

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = state.calls.total()
        result = func(*args, **(kwargs or {}))
        self._census.note(func, result, args, state.calls.total() > before)
        return result


class Census:
    """Watches ``execute_model`` and ``sample_tokens`` of a model runner between `start` and `stop`."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._module: list[str] = []
        self.outside: Counter[str] = Counter()
        self.inside = 0
        self.steps = 0

    def note(self, func: Any, result: Any, args: Any, entered: bool) -> None:
        """Count one operator if it is floating-point arithmetic outside every region; ``entered``: it ran a region."""
        namespace, _, name = str(func.name()).partition("::")
        base = name.partition(".")[0]
        if entered or state.inside_region() or namespace == "isoexec":
            self.inside += 1
            return
        floats = [
            t
            for t in (*tree_leaves(result), *tree_leaves(args))
            if isinstance(t, torch.Tensor) and t.is_floating_point()
        ]
        if not floats or (
            namespace == "aten" and base in _MOVES and not (base in _CASTS and _narrows(result, args))
        ):
            return
        self.outside[f"{namespace}::{base} in {self._module[-1] if self._module else 'runner'}"] += 1

    def start(self) -> None:
        """Wrap the runner's two step methods and follow which module is running."""
        hooks = torch.nn.modules.module
        self._handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]
        for name in ("execute_model", "sample_tokens"):
            setattr(self._runner, name, self._watched(getattr(self._runner, name)))

    def stop(self) -> None:
        """Undo `start`."""
        for handle in self._handles:
            handle.remove()
        for name in ("execute_model", "sample_tokens"):
            delattr(self._runner, name)  # the class's method is under it

    def _enter(self, module: Any, _args: Any) -> None:
        self._module.append(type(module).__qualname__)

    def _leave(self, _module: Any, _args: Any, _output: Any) -> None:
        if self._module:
            self._module.pop()

    def _watched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            self.steps += method.__name__ == "execute_model"
            with _Watch(self):
                return method(*args, **kwargs)

        return step
