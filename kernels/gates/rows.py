# SPDX-License-Identifier: Apache-2.0
"""The checks that ops on rows share on an accelerator: a gate says what is computed, from what, and how it may fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isoexec.kernels.gates.forward import cases, every_batch, many, reruns_at_full_size, touched
from isoexec.kernels.gates.recipes import close, gradients, trainer_forwards

if TYPE_CHECKING:
    from isoexec.kernels.gates.checking import Gate, Run

__all__ = ["Rows", "hang"]

ROWS = 8192  # of the largest batch
SOME = 777  # rows where fewer serve
FEW = 200  # rows of a comparison with float64

Outputs = Tensor | Sequence[Tensor]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """An op over one set of inputs.

    `op` and `spec` take `by_row`, tensors cut alike in dim 0, then `shared`. `free` write the whole output with other free
    settings. `spec_gradients(grad, *by_row, *shared)` gives those of the floating inputs, `exact` is the formula in float64;
    without them the op has no gradient here.
    """

    op: Callable[..., Outputs]
    spec: Callable[..., Outputs]
    by_row: tuple[Tensor, ...]
    shared: tuple[Any, ...] = ()
    free: Iterable[Callable[[], Tensor]] = ()
    spec_gradients: Callable[..., Sequence[Tensor]] | None = None
    exact: Callable[..., Outputs] | None = None
    on_host: bool = False  # the specification is evaluated on the CPU only

    def call(self, cut: slice) -> Tensor:
        """The op over some rows; several outputs side by side."""
        return _joined(self.op(*(t[cut] for t in self.by_row), *self.shared))

    def specified(self, cut: slice, *, host: bool = False) -> Tensor:
        """The specification over some rows, where the inputs lie or on the CPU."""
        inputs = (*(t[cut] for t in self.by_row), *self.shared)
        if host or self.on_host:
            return _joined(self.spec(*map(_host, inputs)))
        return _joined(self.spec(*inputs))

    def of(self, call: Callable[..., Outputs], cut: slice) -> Callable[..., Tensor]:
        """`call` over some rows as a function of its floating inputs, in their order."""
        every = (*(t[cut] for t in self.by_row), *self.shared)

        def given(*inputs: Tensor) -> Tensor:
            left = list(inputs)
            return _joined(call(*(left.pop(0) if _grows(t) else t for t in every)))

        return given

    def inputs(self, cut: slice) -> list[Tensor]:
        """The floating inputs over some rows."""
        return [
            t[cut] if i < len(self.by_row) else t
            for i, t in enumerate((*self.by_row, *self.shared))
            if _grows(t)
        ]


def _grows(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 0


def _host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _joined(found: Outputs) -> Tensor:
    return found if isinstance(found, torch.Tensor) else torch.cat(list(found), -1)


Over = Callable[["Run", int], Iterator[Rows]]
Planted = Callable[["Run"], None]


def hang(gate: Gate, over: Over, planted: Planted, *, more: Planted | None = None) -> None:
    """Hang conformance, case parity, batch invariance, reruns and, of ops that have them, gradients on a gate.

    `over(run, rows)` yields what is checked, `planted(run)` plants the faults that conformance and invariance must catch, and
    `more(run)` compares what else belongs to conformance.
    """
    gate.check("conformance")(partial(_conformance, over=over, planted=planted, more=more))
    bodies = {
        "case_parity": _case_parity,
        "batch_invariance": _batch_invariance,
        "rerun_determinism": _reruns,
        "backward": _backward,
    }
    for family, body in bodies.items():
        gate.check(family)(partial(body, over=over, planted=planted))


def _conformance(run: Run, over: Over, planted: Planted, more: Planted | None) -> None:
    rows = run.pick(min(256, ROWS), ROWS)
    for one in over(run, rows):
        whole = one.call(slice(0, rows))
        wanted = one.specified(slice(0, rows))
        run.equal(whole.cpu() if one.on_host else whole, wanted)
        run.equal(whole[:64].cpu(), one.specified(slice(0, 64), host=True))
        for write in one.free:
            run.equal(write(), whole)
    planted(run)
    if more is not None:
        more(run)


def _batch_invariance(run: Run, over: Over, planted: Planted) -> None:
    rows = run.pick(min(256, ROWS), ROWS)
    for one in over(run, rows):
        every_batch(run, one.call, one.call(slice(0, rows)))
    planted(run)


def _case_parity(run: Run, over: Over, planted: Planted) -> None:
    for one in over(run, SOME):
        packed = cases(run, one.call, SOME)
        if one.spec_gradients is None:
            continue
        every = slice(0, SOME)
        for case, out in trainer_forwards(one.of(one.op, every), *one.inputs(every)).items():
            run.covers(case=case)
            run.equal(out, packed)
    planted(run)


def _reruns(run: Run, over: Over, planted: Planted) -> None:
    for one in over(run, ROWS):
        every = slice(0, ROWS)
        first = reruns_at_full_size(run, partial(one.call, every))
        run.control("the_last_bit_of_one_in_seven", touched(first), first)
        if one.spec_gradients is None:
            continue
        grad = _grad(run, first)
        found = _gradients(one, every, grad)
        for _ in range(run.pick(1, 4)):
            run.equal(_gradients(one, every, grad), found)


def _grad(run: Run, out: Tensor) -> Tensor:
    return many(run, *out.shape, salt=11, dtype=out.dtype, scale=0.7)  # full mantissas, so that sums round


def _gradients(one: Rows, cut: slice, grad: Tensor) -> list[Tensor]:
    return gradients(one.of(one.op, cut), one.inputs(cut), grad)[1:]


def _backward(run: Run, over: Over, planted: Planted) -> None:
    """Gradients are their specification's and, of the inputs by row, the same for any rows; padding at the end changes none."""
    rows = run.pick(min(300, ROWS), ROWS)
    for one in over(run, rows):
        if one.spec_gradients is None:
            continue
        every = slice(0, rows)
        grad = _grad(run, one.call(every))
        found = _gradients(one, every, grad)
        inputs = (grad, *one.by_row, *one.shared)
        wanted = one.spec_gradients(*(map(_host, inputs) if one.on_host else inputs))
        run.equal([t.cpu() for t in found] if one.on_host else found, list(wanted))
        by_row = sum(map(_grows, one.by_row))
        for size in run.over("rows", [r for r in (1, 7, 33, SOME) if r < rows]):
            cut = slice(rows - size, rows)
            part = _gradients(one, cut, grad[cut])
            run.equal(part[:by_row], [t[cut] for t in found[:by_row]])
        few = slice(0, min(FEW, rows))
        if len(found) > by_row:
            zeros = [torch.cat([t[few], torch.zeros_like(t[:9])]) for t in (grad, *one.by_row)]
            padded = Rows(op=one.op, spec=one.spec, by_row=tuple(zeros[1:]), shared=one.shared)
            longer = _gradients(padded, slice(0, len(zeros[0])), zeros[0])
            run.equal(longer[by_row:], _gradients(one, few, grad[few])[by_row:])
            turned = [t[few].roll(1, 0) for t in (grad, *one.by_row)]
            other = Rows(op=one.op, spec=one.spec, by_row=tuple(turned[1:]), shared=one.shared)
            if grad.dtype == torch.float32 and few.stop > 2:
                again = _gradients(other, few, turned[0])
                run.control("rows_in_another_order", again[by_row:], longer[by_row:])
        assert one.exact is not None
        close(run, one.of(one.op, few), one.of(one.exact, few), one.inputs(few), grad[few])
        run.control("the_last_bit_of_one_in_seven", [touched(t) for t in found], found)
