# SPDX-License-Identifier: Apache-2.0
"""Notes what runs outside every contract region in one case of a runtime: a dispatch mode sees every operator torch runs.

It is **inside a region** when it belongs to the ``isoexec`` library, when the innermost Python frame that is not torch's is a
file of `isoexec.kernels` (whose sources are pinned by the contract), or when the runtime says that a region's own code is running
and that frame is a file of `isoexec.adapters`.  Everything else must be in the runtime's allow-list, with a reason, or the census
is not clean.  An allow-list entry that nothing used is reported as well.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isoexec.adapters.arithmetic import COLLECTIVES, floats_in, kind_of
from isoexec.adapters.census import CensusEntry

__all__ = ["Recorder", "frames"]

_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = str(Path(__file__).resolve().parents[1])
_SKIPPED = (_TORCH, __file__, "<frozen", str(Path(contextmanager.__code__.co_filename)))
_MODULE, _STACK = "isoexec.module", "isoexec.stack"  # what is written on gradient nodes
_ADAPTERS, _KERNELS = f"{_PACKAGE}/adapters/", f"{_PACKAGE}/kernels/"
_FRAMES = 6
_SHAPES = 3


@lru_cache(maxsize=1)
def _roots() -> tuple[tuple[str, str], ...]:
    """Folder -> what stands for it in a report: stacks must not depend on where a package is installed."""
    return ((_PACKAGE, "isoexec"), *((str(Path(p).resolve()), "") for p in sys.path if "-packages" in p))


def _short(file: str) -> str:
    for root, name in _roots():
        if file.startswith(root + "/"):
            return f"{name}{file[len(root) :]}".lstrip("/")
    return file


@lru_cache(maxsize=4096)
def _real(file: str) -> str:
    """A source file with links resolved: this package may be found through links."""
    return file if file.startswith("<") else str(Path(file).resolve())


def _shown(file: str, function: str) -> bool:
    return not file.startswith(_SKIPPED) and function != "__torch_function__"


def frames() -> Iterator[tuple[str, int, str]]:
    """(file, line, function) of the Python frames of this thread that are neither torch's nor the census's, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if _shown(file, frame.f_code.co_name):
            yield file, frame.f_lineno, frame.f_code.co_qualname
        frame = frame.f_back  # type: ignore[assignment]


class Recorder:
    """Notes what runs in one case: `watching` is the context in which it does.

    ``roots`` are the modules whose paths name places, by prefix; ``inside`` says whether the runtime is in a region's own code.
    """

    def __init__(
        self,
        case: str,
        roots: Mapping[str, torch.nn.Module],
        *,
        inside: Callable[[], bool] = lambda: False,
    ) -> None:
        self.case = case
        self.inside = 0
        self._in_region = inside
        self._names: dict[int, str] = {}
        for prefix, root in roots.items():
            for path, module in root.named_modules():
                self._names.setdefault(id(module), ".".join(filter(None, (prefix, path))))
        self._running: list[str] = []
        self._found: dict[tuple[Any, ...], tuple[int, list[str]]] = {}

    def entries(self) -> list[CensusEntry]:
        return [
            CensusEntry(
                case=self.case,
                operator=operator,
                kind=kind,
                module=module,
                dtype=dtype,
                node=node,
                stack=stack,
                calls=calls,
                shapes=tuple(shapes),
            )
            for (operator, kind, module, dtype, node, stack), (calls, shapes) in self._found.items()
        ]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note every operator that this thread runs meanwhile, its backward included."""
        hooks = torch.nn.modules.module
        handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            with _Watch(self):
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._running.clear()

    # -- where -----------------------------------------------------------------------------------------------------------

    def _enter(self, module: Any, _args: Any) -> None:
        # a root has no path, and a module made on the way has no name
        kind = type(module).__qualname__
        outer = f"{self._running[-1]}[{kind}]" if self._running else kind
        self._running.append(self._names.get(id(module)) or outer)

    def _leave(self, _module: Any, args: Any, output: Any) -> None:
        path = self._running.pop() if self._running else ""
        if torch.is_grad_enabled():
            _tag(output, args, path, _lines(frames()))

    # -- what ------------------------------------------------------------------------------------------------------------

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count one operator that ran."""
        namespace, _, name = str(func.name()).partition("::")
        if namespace == "isoexec":
            self.inside += 1
            return
        kind = kind_of(func, args, kwargs, result)
        if kind is None:
            return
        stack = list(frames())
        innermost = _real(stack[0][0]) if stack else ""
        # a module that runs within backward is being recomputed: a forward
        backward = torch._C._current_graph_task_id() != -1 and not self._running
        node = torch._C._current_autograd_node() if backward else None
        # a gradient written in C++ has no frame of its own: the innermost one is whoever asked for the gradient
        framed = not backward or isinstance(node, torch.autograd.function.BackwardCFunction)
        if framed and (
            innermost.startswith(_KERNELS) or (self._in_region() and innermost.startswith(_ADAPTERS))
        ):
            self.inside += 1
            return
        module, label = (self._running[-1] if self._running else ""), ""
        shown = _lines(stack)
        if backward:
            metadata: Any = {} if node is None else node.metadata
            label = "a sum of gradients" if node is None else str(node.name())
            module = metadata.get(_MODULE, "")
            shown = shown if framed else metadata.get(_STACK, shown)
        floats = floats_in(tree_leaves(result)) or floats_in(tree_leaves((args, kwargs)))
        dtypes = dict.fromkeys(str(t.dtype)[6:] for t in floats)
        if kind == "cast":
            sources = (t for t in tree_leaves(args) if isinstance(t, Tensor))
            dtypes = dict.fromkeys([*(str(t.dtype)[6:] for t in sources), *dtypes])
        operator = f"{namespace}::{name.partition('.')[0]}"
        key = (operator, kind, module, ">".join(dtypes), label, shown)
        calls, shapes = self._found.get(key, (0, []))
        shape = str(list(floats[0].shape)) if floats else ""
        if shape and shape not in shapes and len(shapes) < _SHAPES:
            shapes.append(shape)
        self._found[key] = (calls + 1, shapes)


def _lines(stack: Iterable[tuple[str, int, str]]) -> tuple[str, ...]:
    return tuple(f"{_short(_real(file))}:{line} {name}" for file, line, name in islice(stack, _FRAMES))


def _tag(output: Any, args: Any, path: str, stack: tuple[str, ...]) -> None:
    """Write on the gradient nodes between a module's inputs and its output which module made them; inner modules come first."""
    stop = {t.grad_fn for t in tree_leaves(args) if isinstance(t, Tensor) and t.grad_fn is not None}
    todo: list[Any] = [t.grad_fn for t in tree_leaves(output) if isinstance(t, Tensor)]
    while todo:
        node = todo.pop()
        if node is None or node in stop or _MODULE in node.metadata:
            continue
        node.metadata[_MODULE] = path
        node.metadata[_STACK] = _forward_stack(node) or stack
        todo += [following for following, _ in node.next_functions]


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def _forward_stack(node: Any) -> tuple[str, ...]:
    """The Python stack that made a node, innermost first, where anomaly detection kept it."""
    kept = node.metadata.get("traceback_")
    found = [_FRAME.search(line) for line in kept] if kept else []
    return _lines((m[1], int(m[2]), m[3]) for m in reversed(found) if m and _shown(m[1], m[3]))


_KEYS = {"cpu": "CPU", "cuda": "CUDA"}


@lru_cache(maxsize=4096)
def _python_kernel(name: str, key: str) -> bool:
    """Whether an operator's kernel for a dispatch key was registered by a Python file."""
    dump = getattr(torch._C, "_dispatch_dump")(name)  # noqa: B009  (not in torch's stubs)
    return bool(re.search(rf"^{key}: registered at \S+\.py:\d+", dump, re.MULTILINE))


class _Watch(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace = str(func.name()).partition("::")[0]
        if namespace not in ("aten", "prims", "isoexec", *COLLECTIVES):
            device = next((t.device.type for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)), "")
            key = _KEYS.get(device, "")
            if key and _python_kernel(func.name(), key):
                with self:
                    return func._op_dk(getattr(torch._C.DispatchKey, key), *args, **kwargs)
        result = func(*args, **kwargs)
        self._recorder.note(func, args, kwargs, result)
        return result
