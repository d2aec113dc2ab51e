# SPDX-License-Identifier: Apache-2.0
"""All objects of a region are asked before the first answer is awaited, and the first that answers otherwise is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from isoexec.kernels import registry
from isoexec.kernels.canaries import Answer
from isoexec.kernels.silu_mul import silu_mul

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")
NAME = "silu_mul.exp/1"
EXPECTED = registry.expected_digest(NAME, {})
Call = Callable[..., Any]


class Objects:
    """A region's canary for objects that are calls; those in ``old`` compute with something old."""

    def __init__(self, *old: Call) -> None:
        self._asked, self._old = registry.Asked(NAME, {}), old
        self.awaited: list[int] = []

    def ask(self, bound: Call) -> Any:
        from isoexec.adapters.vllm.canaries import Asked

        return Asked(self._asked.ask(bound), EXPECTED)

    def stale(self, bound: Call) -> str | None:
        return "something old" if bound in self._old else None

    def digests(self, asked: list[Any]) -> list[tuple[str, str]]:
        self.awaited.append(len(asked))
        return [(found, EXPECTED) for found in self._asked.digests([one.answer for one in asked])]


def call_all(objects: Objects, *calls: Call) -> tuple[str | None, str | None, str | None]:
    from isoexec.adapters.vllm.worker import _call_all

    return _call_all(objects, [(f"layer {index}", call) for index, call in enumerate(calls)])


def good(gate: Tensor, up: Tensor) -> Tensor:
    return silu_mul(gate, up)


def bad(gate: Tensor, up: Tensor) -> Tensor:
    return gate * up


def worse(gate: Tensor, up: Tensor) -> Tensor:
    return gate + up


def refuses(**_: Tensor) -> Tensor:
    raise RuntimeError("no such input")


def digest(call: Call) -> str:
    return registry.canary_digest(call, NAME, {})


def test_faithful_objects_are_awaited_once() -> None:
    objects = Objects()
    assert call_all(objects, *[good] * 9) == (EXPECTED, EXPECTED, None)
    assert objects.awaited == [9]


@pytest.mark.parametrize(
    ("calls", "found", "said"),
    [
        ((good, good, bad, good, worse), digest(bad), "layer 2 (builtins.function) computes something else"),
        ((worse, bad), digest(worse), "layer 0 (builtins.function) computes something else"),
        ((good, bad, refuses), digest(bad), "layer 1 (builtins.function) computes something else"),
        ((good, refuses, bad), None, "layer 1 does not take the canary: RuntimeError: no such input"),
        ((good, lambda **_: None), None, "layer 1 does not take the canary: TypeError: it gives NoneType"),
    ],
)
def test_the_first_object_that_answers_otherwise_is_named(
    calls: tuple[Call, ...], found: str | None, said: str
) -> None:
    got, _, problem = call_all(Objects(), *calls)
    assert got == found
    assert str(problem).startswith(said)


def test_what_is_stale_is_named_where_nothing_before_it_answers_otherwise() -> None:
    assert call_all(Objects(bad), good, bad, worse) == (
        digest(bad),
        EXPECTED,
        "layer 1 computes with something old",
    )
    assert "layer 0 (" in str(call_all(Objects(bad), worse, bad)[2])


def test_answers_too_large_to_keep_are_awaited_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    from isoexec.adapters.vllm import worker

    monkeypatch.setattr(worker, "_KEPT", 3 * 19 * 100 * 4)
    objects = Objects()
    found, _, problem = call_all(objects, *[good] * 7, bad, good)
    assert objects.awaited == [3, 3, 3]
    assert (found, str(problem).split(" (")[0]) == (digest(bad), "layer 7")


def test_an_answer_is_kept_where_the_next_object_writes_over_it() -> None:
    buffer = torch.empty(19, 100)
    right, wrong = (lambda of=of, **x: buffer.copy_(of(**x)) for of in (good, bad))
    assert "layer 1 (" in str(call_all(Objects(), right, wrong)[2])
    assert "layer 0 (" in str(call_all(Objects(), wrong, right)[2])


class Looks(TorchDispatchMode):
    """Counts the operators by which a host looks at what is in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("equal", "_local_scalar_dense", "is_nonzero", "item")
        return func(*args, **(kwargs or {}))


def test_no_look_is_taken_at_a_pair_that_must_be_the_same_and_one_that_differs_voids_the_answer() -> None:
    def of(*pairs: tuple[Tensor, Tensor]) -> Call:
        return lambda gate, up: Answer.where_equal(silu_mul(gate, up), *pairs)

    one, other = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
    asked = registry.Asked(NAME, {})
    with Looks() as looks:
        answers = [
            asked.ask(call)
            for call in (of((one, one.clone())), of((one, one), (one, other)), of((one, one[:1])))
        ]
    assert looks.count == 0
    nothing = registry.output_digest(torch.zeros(()))
    assert asked.digests(answers) == [EXPECTED, nothing, nothing]
    assert asked.digests([]) == []
