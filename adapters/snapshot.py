# SPDX-License-Identifier: Apache-2.0
"""What a process was when the contract was installed, kept so that each verification can say what is different now.

A canary proves bits on its own input; this proves that nothing was exchanged: the class of every module, the methods of its
classes by their code, what was set on one object, hooks on one module or on all, numbers a module computes with, the functions
and constants of the kernels and adapters, the operators' registrations, the constants of the bindings, tables, active modes, and
the process's switches and variables (`isoexec.kernels.switches`).  Weights are not held here: digests watch those.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from isoexec.adapters.base import Binding
from isoexec.kernels import switches

__all__ = ["Change", "Snapshot", "told"]

_PACKAGES = ("isoexec.kernels", "isoexec.adapters")
_SCALARS = (bool, int, float, str, torch.dtype, torch.device)
_WRAPPED = (classmethod, staticmethod, property)
_KINDS = (nn.Module, type)
_HELD = ("isoexec.", "vllm.model_executor.", "vllm.v1.attention.")
"""Objects of these packages that a module holds are looked into: what it hands its arithmetic to."""
_HOOKS = tuple(f"_{when}hooks" for when in ("forward_", "forward_pre_", "backward_", "backward_pre_"))
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)
_MOVING = frozenset(
    (
        "training",
        "current_microbatch",  # Megatron's schedule counts on the layers
        "_do_torchao_reload",  # vLLM's reload of weights notes these on the model
        "_original_do_torchao_reload",
    )
)
"""Scalars that change in a run and no bit of a region with them."""
_OURS = "isoexec_adapter"  # the adapter itself, which holds the snapshot
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Change:
    """One difference: ``path`` is a module's or a region's, or empty for the process itself; ``name`` what of it."""

    path: str
    name: str
    text: str

    def __str__(self) -> str:
        return ".".join(filter(None, (self.path, self.name))) + " " + self.text


def told(changes: Sequence[Change]) -> str | None:
    """Changes in one line, the first few in words; None where there is none."""
    if not changes:
        return None
    lines = [str(c) for c in changes[:_SHOWN]]
    more = len(changes) - len(lines)
    return "since the installation: " + "; ".join([*lines, *([f"and {more} more"] if more else [])])


class _Function(NamedTuple):
    """A function by the object, the code and the defaults: each can be exchanged alone."""

    value: Any
    code: Any
    defaults: Any
    closure: tuple[Any, ...] | None

    @classmethod
    def of(cls, value: Any) -> _Function:
        inner = value
        while isinstance(inner, _WRAPPED):
            inner = inner.fget if isinstance(inner, property) else inner.__func__
        if isinstance(inner, OpOverload):
            return cls(value, inner._op, None, None)
        return cls(
            value,
            getattr(inner, "__code__", None),
            getattr(inner, "__defaults__", None),
            getattr(inner, "__closure__", None),
        )

    def same(self, other: _Function) -> bool:
        return (
            self.value is other.value
            and self.code is other.code
            and self.defaults == other.defaults
            and self.closure is other.closure
        )


def _foreign(hook: Any) -> bool:
    """Whether a hook is none of those by which the trainer's framework gathers parameters and reduces gradients."""
    inner = getattr(hook, "func", hook)
    return not str(getattr(inner, "__module__", "")).startswith("megatron.core.distributed")


def _named(value: Any) -> str:
    where = value if hasattr(value, "__qualname__") else type(value)
    return f"{where.__module__}.{where.__qualname__}"


def _functions(owner: Any) -> dict[str, _Function]:
    """The functions and methods in a class or module, by name."""
    return {
        name: _Function.of(value)
        for name, value in vars(owner).items()
        if isinstance(value, _WRAPPED) or (callable(value) and not isinstance(value, type))
    }


def _constants(module: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, (*_SCALARS, tuple, frozenset))
    }


def _parts(root: nn.Module, prefix: str) -> Iterator[tuple[str, str, Any]]:
    """(module's path, name below it, object) of every module, and of the objects of known packages that modules hold."""
    for path, module in root.named_modules():
        at = ".".join(filter(None, (prefix, path)))
        yield at, "", module
        for name, value in vars(module).items():
            if name == _OURS or isinstance(value, nn.Module | Tensor | type) or callable(value):
                continue
            if type(value).__module__.startswith(_HELD) and hasattr(value, "__dict__"):
                yield at, name, value


class _Part(NamedTuple):
    """One object of the model."""

    kind: type
    own: Mapping[str, _Function]
    hooks: Mapping[str, tuple[Any, ...]]
    scalars: Mapping[str, Any]

    @classmethod
    def of(cls, part: Any, *, scalars: bool = True) -> _Part:
        own = vars(part)
        functions: dict[str, _Function] = {}
        plain: dict[str, Any] = {}
        for name, value in own.items():
            if callable(value) and not isinstance(value, _KINDS):
                functions[name] = _Function.of(value)
            if scalars and isinstance(value, _SCALARS) and name not in _MOVING:
                plain[name] = value
        hooks = {n: own[n].values() for n in _HOOKS if own.get(n)}
        foreign = {n: of for n, every in hooks.items() if (of := tuple(h for h in every if _foreign(h)))}
        return cls(type(part), functions, foreign, plain)

    def same(self, now: _Part) -> bool:
        """Whether nothing can have changed; False says nothing."""
        return (
            self.kind is now.kind
            and not (self.hooks or now.hooks)
            and self.own.keys() == now.own.keys()
            and self.scalars.keys() == now.scalars.keys()
            and all(now.scalars[name] is value for name, value in self.scalars.items())
            and all(function.same(now.own[name]) for name, function in self.own.items())
        )

    def changes(self, now: _Part, path: str, name: str) -> Iterator[Change]:
        def change(what: str, text: str) -> Change:
            return Change(path=path, name=".".join(filter(None, (name, what))), text=text)

        if now.kind is not self.kind:
            yield change("", f"was of class {_named(self.kind)} and is of {_named(now.kind)}")
        for what in {**self.own, **now.own}:
            before, after = self.own.get(what), now.own.get(what)
            if before is None:
                yield change(what, "was set on the object")
            elif after is None:
                yield change(what, "was taken from the object")
            elif not before.same(after):
                yield change(what, f"was {_named(before.value)} and is {_named(after.value)}")
        for what in {**self.hooks, **now.hooks}:
            here, there = self.hooks.get(what, ()), now.hooks.get(what, ())
            if len(here) != len(there) or any(a is not b for a, b in zip(here, there, strict=True)):
                names = ", ".join(map(_named, there)) or "none"
                yield change(what.strip("_"), f"were {len(here)} and are {len(there)}: {names}")
        for what in {**self.scalars, **now.scalars}:
            a, b = self.scalars.get(what, "absent"), now.scalars.get(what, "absent")
            if type(a) is not type(b) or repr(a) != repr(b):  # by what is written: a NaN is itself
                yield change(what, f"was {a!r} and is {b!r}")


def _bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(torch.uint8)


class Snapshot:
    """The state of a process's model and code at one moment; `changes` compares it with now.

    ``roots`` are modules by the prefix of their paths.  ``objects`` are others whose methods count and whose numbers do not, such
    as a model runner.  ``tables`` maps a name to a function that gives the tensors in use, with the tensors that they must be.
    """

    def __init__(
        self,
        roots: Mapping[str, nn.Module],
        bindings: Iterable[Binding] = (),
        *,
        objects: Mapping[str, Any] | None = None,
        tables: Mapping[str, tuple[Callable[[], Sequence[Tensor]], Sequence[Tensor]]] | None = None,
    ) -> None:
        self._roots = dict(roots)
        self._objects = dict(objects or {})
        self._tables = dict(tables or {})
        self._bindings = tuple(bindings)
        self._bound = {b.region: _facts(b) for b in self._bindings}
        self._state = self._look()
        self._classes = self._methods()
        self._modules = {
            name: (module, _functions(module), _classes(module), _constants(module))
            for name, module in sorted(sys.modules.items())
            if name.startswith(_PACKAGES) and module is not None
        }
        self._operators = _registrations()
        self._process = _process()
        self._switches = switches.environment()

    def changes(self) -> list[Change]:
        """Every difference between then and now, the model's first."""
        found: list[Change] = []
        now = self._look()
        for key in {**self._state, **now}:
            before, after = self._state.get(key), now.get(key)
            if before is None or after is None:
                found.append(
                    Change(path=key[0], name=key[1], text="was added" if before is None else "is gone")
                )
            elif not before.same(after):
                found += before.changes(after, *key)
        for b in self._bindings:
            for name, value in _facts(b).items():
                before = self._bound[b.region].get(name, "absent")
                if before != value:
                    found.append(Change(path=b.region, name=name, text=f"was {before!r} and is {value!r}"))
        found += self._code()
        for name, (tensors, wanted) in self._tables.items():
            if any(
                a.shape != b.shape or a.dtype != b.dtype or not torch.equal(_bits(a), _bits(b))
                for a, b in zip(tensors(), wanted, strict=True)
            ):
                found.append(Change(path=name, name="", text="is not the table of the specification"))
        found += [
            Change(path="", name=name, text="was registered anew")
            for name, text in self._operators.items()
            if _registration(name) != text
        ]
        found += [
            Change(
                path="",
                name=name,
                text=f"were {list(map(_named, before))} and are {list(map(_named, after))}",
            )
            for (name, before), after in zip(self._process.items(), _process().values(), strict=True)
            if len(before) != len(after) or any(a is not b for a, b in zip(before, after, strict=True))
        ]
        for line in switches.changes(self._switches, switches.environment()):
            name, _, text = line.partition(" ")
            found.append(Change(path="", name=name, text=text))
        return found

    def _look(self) -> dict[tuple[str, str], _Part]:
        found = {
            (path, name): _Part.of(part)
            for prefix, root in self._roots.items()
            for path, name, part in _parts(root, prefix)
        }
        return found | {(name, ""): _Part.of(part, scalars=False) for name, part in self._objects.items()}

    def _methods(self) -> dict[type, dict[str, _Function]]:
        """The methods of every class that an object of the model is of, their bases included."""
        kinds = {base for part in self._state.values() for base in part.kind.__mro__ if base is not object}
        return {kind: _functions(kind) for kind in kinds}

    def _code(self) -> Iterator[Change]:
        seen: set[str] = set()
        for kind, before in self._classes.items():
            yield from _compared(_named(kind), before, _functions(kind), seen)
        for name, (module, functions, classes, constants) in self._modules.items():
            yield from _compared(name, functions, _functions(module), seen)
            for what, (kind, before) in classes.items():
                now = vars(module).get(what)
                if now is not kind:
                    yield Change(path="", name=f"{name}.{what}", text=f"is another class, {_named(now)}")
                else:
                    yield from _compared(_named(kind), before, _functions(kind), seen)
            for what, value in constants.items():
                now = vars(module).get(what, "absent")
                if type(now) is not type(value) or now != value:
                    yield Change(path="", name=f"{name}.{what}", text=f"was {value!r} and is {now!r}")


def _compared(
    owner: str, before: Mapping[str, _Function], now: Mapping[str, _Function], seen: set[str]
) -> Iterator[Change]:
    """Methods or functions that were replaced or are gone; one that a subclass now hides is in the subclass's own list."""
    for name, function in before.items():
        full = f"{owner}.{name}"
        other = now.get(name)
        if full not in seen and (other is None or not function.same(other)):
            seen.add(full)
            text = "is gone" if other is None else f"was replaced, by {_named(other.value)}"
            yield Change(path="", name=full, text=text)
    for name in now.keys() - before.keys():
        full = f"{owner}.{name}"
        if full not in seen:
            seen.add(full)
            yield Change(path="", name=full, text=f"was added, {_named(now[name].value)}")


def _classes(module: Any) -> dict[str, tuple[type, dict[str, _Function]]]:
    own = module.__name__
    return {
        name: (value, _functions(value))
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == own
    }


def _facts(binding: Binding) -> dict[str, Any]:
    return {
        "function": binding.function,
        "provider": binding.provider,
        "source": binding.source,
        **{f"constants.{name}": value for name, value in binding.constants.items()},
    }


def _registrations() -> dict[str, str]:
    """Operator of ours -> who registered its kernels."""
    c: Any = torch._C
    names = c._dispatch_get_all_op_names()
    return {name: _registration(name) for name in names if name.startswith("isoexec::")}


def _registration(name: str) -> str:
    """Who registered an operator's kernels, as torch's dispatcher tells it; nothing of one that is gone."""
    c: Any = torch._C
    return str(c._dispatch_dump(name))


def _process() -> dict[str, tuple[Any, ...]]:
    """Hooks on every module, and modes that see every call."""
    hooks = torch.nn.modules.module
    return {
        **{name.strip("_"): tuple(getattr(hooks, name, {}).values()) for name in _GLOBAL_HOOKS},
        "function modes": tuple(_get_current_function_mode_stack()),
        "dispatch modes": tuple(_get_current_dispatch_mode_stack()),
    }
