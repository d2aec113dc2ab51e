# SPDX-License-Identifier: Apache-2.0
"""What a gate is made of: checks that compare elements as integers and plant faults that must show themselves."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from isoexec.contracts.digests import digest_bytes, digest_of
from isoexec.contracts.errors import IsoExecError
from isoexec.contracts.evidence import FAMILIES, Check, Control, Subject
from isoexec.kernels import registry
from isoexec.kernels.domain import DomainError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Gate", "Run", "differing", "subject"]

T = TypeVar("T")
Value = str | int | bool
Body = Callable[["Run"], None]

_IMPORTS = re.compile(r"^\s*from isoexec\.kernels\.gates\.(\w+) import", re.MULTILINE)
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    """The tensor's elements as integers of their width, flat."""
    return x.detach().contiguous().view(-1).view(_INTEGER[x.dtype.itemsize])


def differing(a: Tensor, b: Tensor, *, any_nan: bool = False) -> int:
    """How many elements differ in any bit; tensors of other shapes or dtypes differ in every element, and in one at least.

    `any_nan` lets two NaNs be equal whatever their payload, which no function defines.
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        return max(a.numel(), b.numel(), 1)
    unlike = bits(a) != bits(b)
    if any_nan:
        unlike &= ~(torch.isnan(a) & torch.isnan(b)).contiguous().view(-1)
    return int(unlike.sum())


def subject(function: str, arch: str) -> Subject:
    """Our own kernel of a function on an arch, as evidence names it: its package, and the digest of its source."""
    module = registry.FUNCTIONS[function].kernel(arch).module.removesuffix(".ops")
    return Subject(name=module, kind="kernel", source=registry.source_digest(function, arch))


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The checks of one function on one arch, by family; made once, as `GATE`, in a `gate.py`."""

    function: str
    arch: str
    bodies: dict[str, Body] = field(default_factory=dict)

    def __init__(self, function: str, arch: str) -> None:
        object.__setattr__(self, "function", function)
        object.__setattr__(self, "arch", arch)
        object.__setattr__(self, "bodies", {})

    def check(self, family: str) -> Callable[[Body], Body]:
        """Hang a check on the gate; a family has one, and is one of `contracts.evidence.FAMILIES`."""
        assert family in FAMILIES, family
        assert family not in self.bodies, f"{self.function} has two checks of {family}"

        def hang(body: Body) -> Body:
            self.bodies[family] = body
            return body

        return hang

    @property
    def families(self) -> tuple[str, ...]:
        """The families it checks, in the order of `FAMILIES`."""
        return tuple(family for family in FAMILIES if family in self.bodies)

    @cached_property
    def path(self) -> Path:
        """The file that declares it."""
        return registry._ROOT / registry.FUNCTIONS[self.function].kernel(self.arch).folder / "gate.py"

    def digest(self) -> str:
        """`sha256:...` over the gate's file and those of this package that it imports; how the command talks is none."""
        files = {"gate.py": self.path}
        left = ["checking", *_IMPORTS.findall(self.path.read_text(encoding="utf-8"))]
        while left:
            path = Path(__file__).with_name(f"{left.pop()}.py")
            if f"gates/{path.name}" not in files:
                files[f"gates/{path.name}"] = path
                left += _IMPORTS.findall(path.read_text(encoding="utf-8"))
        return digest_of(
            {
                name: digest_bytes(b"\n".join(line.rstrip() for line in path.read_bytes().splitlines()))
                for name, path in files.items()
            }
        )

    def run(
        self,
        family: str,
        constants: Mapping[str, Value],
        *,
        full: bool,
        device: torch.device | None = None,
    ) -> Check:
        """Run one check under one set of constants and return what it compared; it may hold or not (`Check.failures`)."""
        run = Run(constants=constants, full=full, device=device or torch.device("cpu"))
        with torch.no_grad():
            self.bodies[family](run)
        return run.result(family)


class Run:
    """One run of one check: `constants` to compute with, `full` or quick, the `device`; counts what is compared."""

    def __init__(self, *, constants: Mapping[str, Value], full: bool, device: torch.device) -> None:
        self.constants = dict(constants)
        self.full = full
        self.device = device
        self._elements = 0
        self._differing = 0
        self._domain: dict[str, list[Value]] = {}
        self._controls: dict[str, tuple[int, int]] = {}
        self._own = 0

    def pick(self, quick: T, full: T) -> T:
        """One of two, by profile."""
        return full if self.full else quick

    def covers(self, **domain: object) -> None:
        """Note values of the domain that what follows is run over."""
        for name, values in domain.items():
            several = values if isinstance(values, (list, tuple, range)) else [values]
            for value in several:
                plain = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
                assert isinstance(plain, (str, int))
                if plain not in self._domain.setdefault(name, []):
                    self._domain[name].append(plain)

    def over(self, name: str, values: Iterable[T]) -> Iterator[T]:
        """Yield the values, noting each in the domain as it is run."""
        for value in values:
            self.covers(**{name: value})
            yield value

    def equal(
        self, got: Tensor | Sequence[Tensor], want: Tensor | Sequence[Tensor], *, any_nan: bool = False
    ) -> None:
        """Compare bits; the first comparison of a check is also made with one bit of one element flipped, and must fail."""
        pairs = [(got, want)] if isinstance(got, torch.Tensor) else list(zip(got, want, strict=True))
        for a, b in pairs:
            assert isinstance(a, torch.Tensor)
            assert isinstance(b, torch.Tensor)
            self._elements += max(a.numel(), b.numel())
            self._differing += differing(a, b, any_nan=any_nan)
            if "one_bit_of_the_result" not in self._controls and a.numel() and a.is_floating_point():
                planted = a.detach().clone().contiguous()
                bits(planted)[planted.numel() // 2] ^= 1
                self._control("one_bit_of_the_result", planted, b, any_nan=any_nan)

    def holds(self, mask: Tensor) -> None:
        """Count a statement about each element: one that is false differs."""
        self._elements += mask.numel()
        self._differing += int((~mask).sum())

    def refuses(self, call: Callable[[], object]) -> None:
        """The call is outside the function's domain: anything but `DomainError` counts as one element that differs."""
        self._elements += 1
        try:
            call()
        except DomainError:
            return
        self._differing += 1

    def control(self, name: str, got: Tensor | Sequence[Tensor], want: Tensor | Sequence[Tensor]) -> None:
        """A planted fault: `got` must differ from `want`, each time it is planted."""
        self._own += 1
        pairs = [(got, want)] if isinstance(got, torch.Tensor) else list(zip(got, want, strict=True))
        joined = [torch.cat([bits(part) for part in side]) for side in zip(*pairs, strict=True)]
        self._control(name, joined[0], joined[1])

    def _control(self, name: str, got: Tensor, want: Tensor, *, any_nan: bool = False) -> None:
        elements, seen = self._controls.get(name, (0, -1))
        now = differing(got, want, any_nan=any_nan)
        # one that was blind once is blind
        self._controls[name] = (
            elements + want.numel(),
            now if seen < 0 else seen + now if seen and now else 0,
        )

    @contextlib.contextmanager
    def poisoned(self) -> Iterator[None]:
        """Fresh memory holds NaN, so that what is not written shows; that it does is itself a control."""
        with poisoned_memory():
            unwritten = torch.empty(64, dtype=torch.float32, device=self.device)
            self._control("unwritten_memory", unwritten, torch.zeros_like(unwritten))
            yield

    def ranks(self, size: int, worker: Callable[..., Any], *args: object) -> list[Any]:
        """`worker(rank, size, group, *args)` in `size` processes of one group, or here with no group for 1; by rank.

        `worker` is a module's function, and returns tensors in dicts, lists and tuples.
        """
        from isoexec.kernels.gates.ranks import launch

        return [worker(0, 1, None, *args)] if size == 1 else launch(size, worker, args, self.device.type)

    def result(self, family: str) -> Check:
        """What was compared. A check without a control of its own has none: flipping a result's bit proves the comparison."""
        return Check(
            family=family,
            constants=dict(self.constants),
            domain={name: tuple(values) for name, values in sorted(self._domain.items())},
            elements=self._elements,
            differing=self._differing,
            controls=tuple(
                Control(name=name, elements=elements, differing=seen)
                for name, (elements, seen) in sorted(self._controls.items())
            )
            if self._own
            else (),
        )


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """`torch.empty`, `empty_like` and `Tensor.new_empty` give NaN, process-wide, until it ends."""

    def poison(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def fresh(*args: Any, **kwargs: Any) -> Tensor:
            out = make(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() and not out.is_meta else out

        return fresh

    kept = [(torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")]
    originals = [getattr(owner, name) for owner, name in kept]
    for (owner, name), original in zip(kept, originals, strict=True):
        setattr(owner, name, poison(original))
    try:
        yield
    finally:
        for (owner, name), original in zip(kept, originals, strict=True):
            setattr(owner, name, original)


class GateError(IsoExecError):
    """A gate that cannot be run: `gate` it is about, what was `wanted`, what was `found`, the `fix`."""

    def __init__(self, gate: str, wanted: str, found: str, fix: str) -> None:
        self.gate = gate
        self.wanted = wanted
        self.found = found
        self.fix = fix
        super().__init__(gate, wanted, found, fix)

    def __str__(self) -> str:
        return f"{self.gate}: wanted {self.wanted}, found {self.found}; {self.fix}"
