# SPDX-License-Identifier: Apache-2.0
"""Lists the arithmetic that a runtime does outside every contract region, one forward of each case of the contract.

A dispatch mode sees every operator torch runs.  One is **arithmetic** when it touches floating-point data and is none of
`MOVES` (copies, views, gathers, comparisons and allocations round nothing): every other ``aten`` operator, in place, fused or in
backward; a cast that cannot keep every value (`exact_cast`); an accumulating ``index_put``; a collective that adds (those of
`CARRIES` only move); a value read out of torch into Python, where no mode sees what becomes of it; and every operator of another
library, whose kernel is a closed box.  An operator written in Python is opened instead, and what it runs is judged.

It is **inside a region** when it belongs to the ``isoexec`` library, when the innermost Python frame that is not torch's is a
file of `isoexec.kernels` (whose sources are pinned by the contract), or when the runtime says that a region's own code is running
and that frame is a file of `isoexec.adapters`.  Everything else must be in the runtime's allow-list, with a reason, or the census
is not clean.  An allow-list entry that nothing used is reported as well.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isoexec.contracts.errors import IsoExecError
from isoexec.contracts.schema import Contract, library

__all__ = [
    "CARRIES",
    "MOVES",
    "Allowed",
    "Census",
    "CensusEntry",
    "CensusError",
    "Recorder",
    "exact_cast",
    "kind_of",
    "load_allowed",
    "main",
    "run",
    "take_census",
]


class CensusError(IsoExecError):
    """An allow-list that cannot be read, or a census that could not be taken."""


MOVES = frozenset(
    """
    _reshape_alias _to_copy _unsafe_view alias all any arange argmax argmin argsort as_strided as_strided_ bucketize cat chunk
    clone constant_pad_nd contiguous copy copy_ detach detach_ diagonal embedding empty empty_like empty_permuted empty_strided
    eq equal expand eye fill fill_ flip full full_like gather ge gt index index_copy index_copy_ index_put index_put_ index_select
    is_same_size isfinite isinf isnan le lift_fresh lift_fresh_copy logical_and logical_not logical_or lt masked_fill masked_fill_
    masked_scatter masked_select movedim narrow ne new_empty new_empty_strided new_full new_ones new_zeros nonzero ones ones_like
    pad permute pin_memory record_stream repeat repeat_interleave reshape resize_ resolve_conj resolve_neg roll scalar_tensor
    scatter scatter_ searchsorted select select_backward select_scatter set_ slice slice_backward slice_scatter sort split
    split_with_sizes squeeze squeeze_ stack t to topk transpose transpose_ tril triu unbind unfold unsafe_split
    unsafe_split_with_sizes unsqueeze unsqueeze_ view view_as where zero_ zeros zeros_like
    """.split()  # noqa: SIM905  (a hundred quoted words are no easier to read)
)
"""``aten`` operators that move, select or compare values; they round nothing (but see `kind_of` for casts and accumulation)."""
CARRIES = frozenset(
    """
    _allgather_base_ allgather_ allgather_coalesced_ allgather_into_tensor_coalesced_ alltoall_ alltoall_base_ barrier broadcast_
    gather_ monitored_barrier_ recv_ recv_any_source_ scatter_ send
    all_gather_into_tensor all_gather_into_tensor_coalesced all_gather_into_tensor_out all_to_all_single broadcast broadcast_
    wait_tensor
    """.split()  # noqa: SIM905
)
"""Collectives of ``c10d`` and ``_c10d_functional`` that add nothing."""

_CASTS = frozenset(("_to_copy", "to", "copy", "copy_"))
_PUTS = frozenset(("index_put", "index_put_", "_index_put_impl_"))
_READS = frozenset(("_local_scalar_dense", "item"))
_COLLECTIVES = frozenset(("c10d", "_c10d_functional", "_c10d_functional_autograd"))
_PICKS = ("MAX", "MIN", "BAND", "BOR", "BXOR")  # reductions in which order cannot matter
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


def exact_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether every value of ``source`` is one of ``target``: bfloat16 to float32 is, to float16 is not."""
    if source == target:
        return True
    if source is torch.bool:
        return True
    if source.is_complex or target.is_complex:
        return target.is_complex and exact_cast(source.to_real(), target.to_real())
    if source.is_floating_point:
        if not target.is_floating_point:
            return False
        a, b = torch.finfo(source), torch.finfo(target)
        return b.eps <= a.eps and b.max >= a.max and b.tiny <= a.tiny
    if not target.is_floating_point:
        return True  # integers to integers: no floating-point value is made or lost
    return torch.iinfo(source).max <= 2 / torch.finfo(target).eps


def _floats(leaves: Iterable[Any]) -> list[Tensor]:
    return [
        t
        for t in leaves
        if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()) and t.device.type != "meta"
    ]


def _adds(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a collective combines values in an order; one whose reduction cannot be read does."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, str):
            return value.upper() not in _PICKS
        if isinstance(value, torch.ScriptObject) and getattr(value, "_has_method")("op"):  # noqa: B009
            kinds = torch.distributed.ReduceOp.RedOpType
            return int(getattr(value, "op")()) not in [int(getattr(kinds, name)) for name in _PICKS]  # noqa: B009
    return True


def kind_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> str | None:
    """What an operator that ran is: ``arithmetic``, ``cast``, ``collective``, ``read-out`` or ``foreign``; None for a move.

    ``foreign`` is an operator of a library that is neither torch's nor ours: what its kernel computes cannot be seen.
    """
    if not (floats := _floats(tree_leaves((result, args, dict(kwargs))))):
        return None  # positions, slots, token ids: integers are exact
    namespace, _, name = str(func.name()).partition("::")
    base = name.partition(".")[0]
    if namespace in _COLLECTIVES:
        return None if base in CARRIES or not _adds(args, kwargs) else "collective"
    if namespace not in ("aten", "prims"):
        return "foreign"
    if base in _READS:
        return "read-out"
    if base in _CASTS:
        target = args[0] if base == "copy_" else result
        source = args[1] if base in ("copy_", "copy") else args[0]
        if not isinstance(target, Tensor) or not isinstance(source, Tensor):
            return "cast"
        return None if exact_cast(source.dtype, target.dtype) else "cast"
    if base in _PUTS and (kwargs.get("accumulate") or (len(args) > 3 and args[3])):
        return "arithmetic"
    if base in MOVES and namespace == "aten":
        return None
    assert floats
    return "arithmetic"


@dataclass(frozen=True, kw_only=True)
class CensusEntry:
    """One place where arithmetic ran outside every region.

    ``stack`` holds the innermost Python frames that are not torch's, innermost first; in backward those of the forward that made
    the gradient ``node``.  ``reason`` is the allow-list's, or None where nothing allows it.
    """

    case: str
    operator: str
    kind: str
    module: str
    dtype: str
    calls: int
    shapes: tuple[str, ...] = ()
    node: str = ""
    stack: tuple[str, ...] = ()
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "operator": self.operator,
            "kind": self.kind,
            "module": self.module,
            "dtype": self.dtype,
            "calls": self.calls,
            "shapes": list(self.shapes),
            "node": self.node,
            "stack": list(self.stack),
            "reason": self.reason,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CensusEntry:
        return cls(**{**data, "shapes": tuple(data["shapes"]), "stack": tuple(data["stack"])})

    def lines(self) -> list[str]:
        """In words, the first line without its stack."""
        where = f"{self.module or 'no module'}" + (f", backward of {self.node}" if self.node else "")
        shapes = " ".join(self.shapes)
        head = f"{self.operator} ({self.kind}) x{self.calls} in {where}: {self.dtype} {shapes}".rstrip()
        return [head, *(f"    {frame}" for frame in self.stack)]


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """An allow-list entry: ``operator`` and ``module`` are shell patterns, ``cases`` empty for every case.

    ``optional`` entries are not reported when nothing uses them: what they allow depends on how a job is set up.
    """

    operator: str
    module: str
    reason: str
    cases: tuple[str, ...] = ()
    node: str = "*"
    optional: bool = False

    def admits(self, entry: CensusEntry) -> bool:
        return (
            fnmatchcase(entry.operator, self.operator)
            and fnmatchcase(entry.module, self.module)
            and fnmatchcase(entry.node, self.node)
            and (not self.cases or entry.case in self.cases)
        )

    def __str__(self) -> str:
        cases = f" ({', '.join(self.cases)})" if self.cases else ""
        return f"{self.operator} in {self.module or 'no module'}{cases}: {self.reason}"


def load_allowed(path: Path | str) -> tuple[Allowed, ...]:
    """The allow-list in a YAML file; CensusError for an entry without operator, module or reason, or with an unknown field."""
    rows = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or []
    if not isinstance(rows, list):
        raise CensusError(f"{path}: wanted a list of entries")
    known = {"operator", "module", "reason", "cases", "node", "optional"}
    found = []
    for index, row in enumerate(rows):
        at = f"{path}: entry {index + 1}"
        if not isinstance(row, dict) or set(row) - known:
            extra = sorted(set(row) - known) if isinstance(row, dict) else row
            raise CensusError(f"{at}: unknown {extra}; an entry has {', '.join(sorted(known))}")
        for name in ("operator", "module", "reason"):
            if not isinstance(row.get(name), str) or (name != "module" and not row[name].strip()):
                raise CensusError(f"{at}: no {name}; say which, and why it may run outside a region")
        found.append(Allowed(**{**row, "cases": tuple(row.get("cases", ()))}))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Census:
    """What one runtime ran: ``inside`` counts operators inside regions by case, ``entries`` everything outside them."""

    runtime: str
    versions: Mapping[str, str]
    contract: str | None
    inside: Mapping[str, int]
    entries: tuple[CensusEntry, ...]
    stale: tuple[str, ...] = ()

    @property
    def outside(self) -> tuple[CensusEntry, ...]:
        """The entries that nothing allows."""
        return tuple(e for e in self.entries if e.reason is None)

    @property
    def allowed(self) -> tuple[CensusEntry, ...]:
        return tuple(e for e in self.entries if e.reason is not None)

    @property
    def clean(self) -> bool:
        """Whether every case ran, all its arithmetic in regions or allowed, and every allow-list entry is used."""
        return bool(self.inside) and all(self.inside.values()) and not self.outside and not self.stale

    def case(self, name: str) -> tuple[CensusEntry, ...]:
        """The entries of one case that nothing allows."""
        return tuple(e for e in self.outside if e.case == name)

    @classmethod
    def judged(
        cls,
        recorders: Sequence[Recorder],
        allowed: Sequence[Allowed],
        *,
        runtime: str,
        versions: Mapping[str, str],
        contract: str | None,
    ) -> Census:
        """The census of what ``recorders`` saw, one a case, under an allow-list."""
        entries = [entry for r in recorders for entry in r.entries()]
        return cls.of(
            entries,
            {r.case: r.inside for r in recorders},
            allowed,
            runtime=runtime,
            versions=versions,
            contract=contract,
        )

    @classmethod
    def of(
        cls,
        entries: Iterable[CensusEntry],
        inside: Mapping[str, int],
        allowed: Sequence[Allowed],
        *,
        runtime: str,
        versions: Mapping[str, str],
        contract: str | None,
    ) -> Census:
        """Judge entries by an allow-list; an entry of the list that admits none of them is stale."""
        used: set[int] = set()
        judged = []
        for entry in entries:
            index = next((i for i, a in enumerate(allowed) if a.admits(entry)), None)
            if index is not None:
                used.add(index)
                entry = replace(entry, reason=allowed[index].reason)  # noqa: PLW2901
            judged.append(entry)
        ran = set(inside)
        stale = [
            str(a)
            for i, a in enumerate(allowed)
            if i not in used and not a.optional and (not a.cases or ran & set(a.cases))
        ]
        judged.sort(key=lambda e: (e.case, -e.calls, e.operator, e.module))
        return cls(
            runtime=runtime,
            versions=dict(versions),
            contract=contract,
            inside=dict(inside),
            entries=tuple(judged),
            stale=tuple(stale),
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "runtime": self.runtime,
            "versions": dict(self.versions),
            "contract": self.contract,
            "clean": self.clean,
            "inside": dict(self.inside),
            "entries": [e.to_dict() for e in self.entries],
            "stale": list(self.stale),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Census:
        return cls(
            runtime=data["runtime"],
            versions=data["versions"],
            contract=data["contract"],
            inside=data["inside"],
            entries=tuple(CensusEntry.from_dict(e) for e in data["entries"]),
            stale=tuple(data["stale"]),
        )

    def text(self) -> str:
        """For people: one line a case, then what is outside with its stack, what is allowed with its reason, what is stale."""
        versions = ", ".join(f"{k} {v}" for k, v in sorted(self.versions.items()))
        lines = [f"{self.runtime}: {versions}; {self.contract or 'no contract'}"]
        for case, inside in self.inside.items():
            here = self.case(case)
            calls = sum(e.calls for e in here)
            said = f"{calls} outside, in {len(here)} places" if here else "nothing outside"
            allowed = sum(e.calls for e in self.allowed if e.case == case)
            lines.append(f"  {case:<18} {said}; {inside} in regions, {allowed} allowed")
            for entry in here:
                lines += [f"    {line}" for line in entry.lines()]
        reasons: dict[str, list[str]] = {}
        for entry in self.allowed:
            names = reasons.setdefault(entry.reason or "", [])
            if entry.operator not in names:
                names.append(entry.operator)
        lines += [f"  allowed: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
        lines += [f"  stale: {line}; nothing uses it, take it out of the list" for line in self.stale]
        return "\n".join(lines)


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
        floats = _floats(tree_leaves(result)) or _floats(tree_leaves((args, kwargs)))
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
        if namespace not in ("aten", "prims", "isoexec", *_COLLECTIVES):
            device = next((t.device.type for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)), "")
            key = _KEYS.get(device, "")
            if key and _python_kernel(func.name(), key):
                with self:
                    return func._op_dk(getattr(torch._C.DispatchKey, key), *args, **kwargs)
        result = func(*args, **kwargs)
        self._recorder.note(func, args, kwargs, result)
        return result


# -- the command -------------------------------------------------------------------------------------------------------

_RUNTIMES = ("vllm", "megatron")
_ENV = {
    "vllm": {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker is in the process that watches
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_PLUGINS": "isoexec",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    },
    "megatron": {},
}


def main(take: Callable[[str, str | None, str], Census]) -> None:
    """A runtime's own process: what is asked (model, contract, dtype) comes as JSON on stdin, the answer goes to a file."""
    asked = json.loads(sys.stdin.read())
    try:
        census = take(asked["model"], asked["contract"], asked["dtype"])
        answer: dict[str, Any] = {"census": census.to_dict()}
    except IsoExecError as error:
        answer = {"error": str(error)}
    Path(asked["out"]).write_text(json.dumps(answer), encoding="utf-8")


def take_census(runtime: str, model: str, contract: str | None, dtype: str = "bfloat16") -> Census:
    """The census of one runtime, taken in a process of its own: an engine reads its environment when it is imported.

    Raises CensusError where that process does not answer, with the end of what it said.
    """
    claims = Contract.load(contract).claims.environment.variables if contract else {}
    unset = {"ISOEXEC_RUN", "ISOEXEC_STATE_DIR", "ISOEXEC_CONTRACT"}
    env = {k: v for k, v in os.environ.items() if k not in unset} | _ENV[runtime] | dict(claims)
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "census.json"), Path(folder, "log")
        asked = {"model": model, "contract": contract, "dtype": dtype, "out": str(out)}
        with log.open("w") as said:
            done = subprocess.run(
                [sys.executable, "-P", "-m", f"isoexec.adapters.{runtime}.census"],
                input=json.dumps(asked),
                text=True,
                stdout=said,
                stderr=said,
                env=env,
                check=False,
            )
        if not out.is_file():
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise CensusError(f"the census of {runtime} ended with {done.returncode}:\n{tail}")
        answer = json.loads(out.read_text())
    if "error" in answer:
        raise CensusError(f"the census of {runtime}: {answer['error']}")
    return Census.from_dict(answer["census"])


def run(argv: list[str]) -> int:
    """Run one forward of each case on the real engines and list the arithmetic outside every contract region."""
    parser = argparse.ArgumentParser(prog="isoexec census", description=run.__doc__)
    parser.add_argument("--runtime", choices=(*_RUNTIMES, "both"), default="both")
    parser.add_argument("--model", default="tiny", help="a Hugging Face folder, or tiny: a small dense Qwen3")
    parser.add_argument(
        "--contract",
        default="qwen3-dense-cpu",
        help="a shipped contract, a file, or none to see a runtime as it is",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    args = parser.parse_args(argv)
    contract = None
    if args.contract != "none":
        named = Path(args.contract)
        contract = str(named if named.suffix else library(args.contract))
    found = []
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if model == "tiny":
            from isoexec.adapters.demo.tiny import make_qwen3

            model = str(make_qwen3(Path(folder, "qwen3"), seed=7))
        for runtime in _RUNTIMES if args.runtime == "both" else (args.runtime,):
            found.append(take_census(runtime, model, contract, args.dtype))
            if args.format == "text":
                print(found[-1].text(), flush=True)
    clean = all(census.clean for census in found)
    if args.format == "json":
        print(
            json.dumps({"clean": clean, "runtimes": [c.to_dict() for c in found]}, indent=2, sort_keys=True)
        )
    else:
        print("clean" if clean else "not clean: what is listed runs outside every region of the contract")
    return 0 if clean else 1
