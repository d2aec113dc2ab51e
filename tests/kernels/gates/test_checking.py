# SPDX-License-Identifier: Apache-2.0
"""A check counts what differs in any bit, and counts for nothing where one of its controls could not fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from isoexec.kernels import registry
from isoexec.kernels.domain import DomainError
from isoexec.kernels.gates import Gate, Run, checking
from isoexec.kernels.gates.checking import differing
from isoexec.kernels.gates.inputs import fill, nudged, odd_values, shuffled, wide
from isoexec.kernels.gates.recipes import close, company, trainer_forwards


@pytest.fixture
def run() -> Run:
    return Run(constants={}, full=False, device=torch.device("cpu"))


def test_elements_are_compared_as_integers() -> None:
    zero = torch.tensor([0.0, 1.0, float("nan")])
    assert differing(zero, torch.tensor([-0.0, 1.0, float("nan")])) == 1
    assert differing(zero, zero.clone()) == 0
    other_nan = zero.clone()
    other_nan.view(torch.int32)[2] ^= 1
    assert differing(zero, other_nan) == 1
    assert differing(zero, other_nan, any_nan=True) == 0
    assert differing(zero, torch.tensor([0.0, 1.0, 2.0]), any_nan=True) == 1
    assert differing(zero, zero[:2]) == 3
    assert differing(zero, zero.double()) == 3
    assert differing(torch.zeros(0), torch.zeros(0, 2)) == 1


def test_a_check_that_holds_says_how_much_it_compared(run: Run) -> None:
    x = fill(5, 7, salt=1)
    for dtype in run.over("dtype", (torch.bfloat16, torch.float32)):
        run.equal(x.to(dtype), x.to(dtype))
    run.control("one_ulp", nudged(x), x)
    check = run.result("conformance")
    assert check.failures() == []
    assert (check.elements, check.differing) == (70, 0)
    assert check.domain == {"dtype": ("bfloat16", "float32")}
    assert {one.name: one.differing for one in check.controls} == {"one_bit_of_the_result": 1, "one_ulp": 5}


def test_a_flipped_bit_in_what_is_compared_is_itself_a_control(run: Run) -> None:
    x = fill(9, salt=1)
    run.equal(x, x)
    run.control("another", x + 1, x)
    assert "one_bit_of_the_result" in {one.name for one in run.result("conformance").controls}


def test_one_differing_element_is_enough_to_fail(run: Run) -> None:
    x = fill(100, salt=1)
    y = x.clone()
    y.view(torch.int32)[41] ^= 1
    run.equal(y, x)
    run.control("another", x + 1, x)
    assert run.result("conformance").failures() == ["1 of 100 elements differ"]


def test_a_control_that_passes_makes_the_check_count_for_nothing(run: Run) -> None:
    x = fill(100, salt=1)
    run.equal(x, x)
    run.control("no_fault_at_all", x.clone(), x)
    (why,) = run.result("conformance").failures()
    assert why == "control no_fault_at_all passed: 100 elements, none differs"


def test_a_control_that_was_blind_once_is_blind(run: Run) -> None:
    x = fill(100, salt=1)
    run.equal(x, x)
    for got in (x + 1, x, x + 1):
        run.control("sometimes", got, x)
    assert run.result("conformance").failures() == ["control sometimes passed: 300 elements, none differs"]


def test_a_check_without_a_control_of_its_own_proves_nothing(run: Run) -> None:
    x = fill(100, salt=1)
    run.equal(x, x)
    assert run.result("conformance").failures() == ["no control was planted"]


def test_a_check_that_compares_nothing_proves_nothing(run: Run) -> None:
    run.control("another", torch.ones(1), torch.zeros(1))
    assert run.result("conformance").failures() == ["no element was compared"]


def test_memory_that_is_not_written_shows(run: Run) -> None:
    with run.poisoned():
        assert bool(torch.empty(3).isnan().all())
        assert bool(torch.zeros(3).new_empty(3).isnan().all())
        torch.empty(3, dtype=torch.int64)
    run.control("another", torch.ones(1), torch.zeros(1))
    controls = {one.name: one.differing for one in run.result("degenerate_shapes").controls}
    assert controls["unwritten_memory"] == 64


def test_only_a_refusal_of_the_domain_counts_as_one(run: Run) -> None:
    def refuse() -> None:
        raise DomainError("op", "found", "wanted")

    run.refuses(refuse)
    assert run.result("degenerate_shapes").differing == 0
    run.refuses(lambda: None)
    assert run.result("degenerate_shapes").differing == 1
    with pytest.raises(ZeroDivisionError):
        run.refuses(lambda: 1 / 0)


def test_a_kernel_chosen_by_batch_size_is_seen(run: Run) -> None:
    x = fill(33, 8, salt=1)

    def by_size(rows: torch.Tensor) -> torch.Tensor:
        out = x[rows] * 3.0
        return nudged(out) if len(rows) == 1 else out

    company(run, by_size, 33, x * 3.0)
    assert run.result("batch_invariance").differing > 20


def test_the_trainers_three_forwards_are_three_calls() -> None:
    seen: list[bool] = []

    def call(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_grad_enabled())
        return x * 2.0

    outs = trainer_forwards(call, fill(3, salt=1))
    assert set(outs) == {"trainer_fwd", "trainer_recompute", "trainer_score"}
    assert seen == [True, False, True, False]


def test_a_gradient_that_is_not_one_is_seen(run: Run) -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.times = 2.001
            return x * 2.0

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g * ctx.times

    x = fill(50, salt=1)
    close(run, Wrong.apply, lambda x: x * 2.0, [x], fill(50, salt=2))
    assert run.result("backward").differing > 40


def test_inputs_are_the_same_everywhere() -> None:
    assert sorted(shuffled(100).tolist()) == list(range(100))
    assert int((shuffled(100) == torch.arange(100)).sum()) < 10
    assert differing(wide(3, 7, salt=5), fill(3, 7, salt=5)) == 0
    assert bool((nudged(fill(14, salt=1)) != fill(14, salt=1))[::7].all())
    assert bool(odd_values(torch.bfloat16).isnan().any())


def test_a_gates_digest_is_of_what_decides_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from isoexec.kernels.silu_mul.gate import GATE

    root = tmp_path / "kernels"
    for folder in ("", "gates", "silu_mul"):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for path in (registry._ROOT / folder).glob("*.py"):
            (root / folder / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(checking, "__file__", str(root / "gates" / "checking.py"))
    monkeypatch.setattr(registry, "_ROOT", root)

    def digest() -> str:
        return Gate(GATE.function, GATE.arch).digest()

    first, source = digest(), registry.source_digest.__wrapped__("silu_mul.exp/1", "cpu")
    for name, counts in (
        ("cli", False),
        ("showing", False),
        ("checking", True),
        ("recipes", True),
        ("ranks", True),
    ):
        before = digest()
        with (root / "gates" / f"{name}.py").open("a") as handle:
            handle.write("# edited\n")
        assert (digest() != before) == counts, name
    (root / "silu_mul" / "gate.py").write_text("from isoexec.kernels.gates.inputs import fill\n")
    assert digest() != first
    assert registry.source_digest.__wrapped__("silu_mul.exp/1", "cpu") == source, (
        "a gate is no part of its kernel"
    )
