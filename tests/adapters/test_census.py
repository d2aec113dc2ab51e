# SPDX-License-Identifier: Apache-2.0
"""What the census takes for arithmetic, where it says it ran, and what an allow-list may not hide."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from isoexec.adapters.arithmetic import CARRIES, MOVES, exact_cast
from isoexec.adapters.census import Allowed, Census, CensusEntry, CensusError, load_allowed
from isoexec.adapters.recorder import Recorder
from isoexec.kernels.rms_norm import rms_norm

X = torch.linspace(-1, 1, 24).view(4, 6)
HALF = X.bfloat16()


def world() -> str:
    group = dist.group.WORLD
    assert group is not None
    return str(group.group_name)


def seen(work: Callable[[], object], root: nn.Module | None = None, **options: Any) -> list[CensusEntry]:
    recorder = Recorder("case", {"": root or nn.Module()}, **options)
    with recorder.watching():
        work()
    return recorder.entries()


def names(entries: list[CensusEntry]) -> list[str]:
    return [e.operator for e in entries]


@torch.library.custom_op("census_test::closed", mutates_args=())
def _closed(x: Tensor) -> Tensor:
    return x.clone()


_LIBRARY = torch.library.Library("census_test", "FRAGMENT")
_LIBRARY.define("opened(Tensor x) -> Tensor")
_LIBRARY.impl("opened", lambda x: (x.view(-1) * 2).view_as(x), "CPU")


@pytest.mark.parametrize(
    ("work", "operator", "kind"),
    [
        (lambda: X * 1.0000001, "aten::mul", "arithmetic"),
        (lambda: X.clone().mul_(1.0000001), "aten::mul_", "arithmetic"),
        (lambda: X.clone().add_(X), "aten::add_", "arithmetic"),
        (lambda: torch.add(X, X, out=torch.empty_like(X)), "aten::add", "arithmetic"),
        (lambda: nn.functional.layer_norm(X, (6,)), "aten::native_layer_norm", "arithmetic"),
        (lambda: nn.functional.silu(HALF), "aten::silu", "arithmetic"),
        (lambda: X @ X.T, "aten::mm", "arithmetic"),
        (lambda: torch.bmm(X[None], X.T[None]), "aten::bmm", "arithmetic"),
        (lambda: nn.functional.linear(X, X, torch.zeros(4)), "aten::addmm", "arithmetic"),
        (X.sum, "aten::sum", "arithmetic"),
        (lambda: X.softmax(-1), "aten::_softmax", "arithmetic"),
        (lambda: X.clamp(0, 1), "aten::clamp", "arithmetic"),
        (lambda: torch.index_add(X, 0, torch.tensor([0]), X[:1]), "aten::index_add", "arithmetic"),
        (
            lambda: X.index_put((torch.tensor([0, 0]),), X[:2], accumulate=True),
            "aten::index_put",
            "arithmetic",
        ),
        (lambda: X.clone().uniform_(), "aten::uniform_", "arithmetic"),
        (X.bfloat16, "aten::_to_copy", "cast"),
        (HALF.half, "aten::_to_copy", "cast"),
        (X.long, "aten::_to_copy", "cast"),
        (lambda: torch.arange(4).float(), "aten::_to_copy", "cast"),
        (lambda: torch.empty(4, 6, dtype=torch.bfloat16).copy_(X), "aten::copy_", "cast"),
        (X[0, 0].item, "aten::_local_scalar_dense", "read-out"),
        (lambda: float(X.select(0, 0)[0]) * 3, "aten::_local_scalar_dense", "read-out"),
    ],
)
def test_arithmetic_is_seen(work: Callable[[], object], operator: str, kind: str) -> None:
    assert [(e.operator, e.kind) for e in seen(work)] == [(operator, kind)]


def test_fused_attention_is_seen_whatever_kernel_it_takes() -> None:
    q = X.view(1, 1, 4, 6)
    found = seen(lambda: nn.functional.scaled_dot_product_attention(q, q, q))
    assert any("scaled_dot_product" in e.operator for e in found)


@pytest.mark.parametrize(
    "work",
    [
        lambda: X.t().contiguous().view(-1)[3:],
        lambda: torch.cat([X, X]).split(2),
        lambda: X.gather(0, torch.zeros(1, 6, dtype=torch.long)),
        lambda: torch.where(X > 0, X, torch.zeros_like(X)).masked_fill(X < 0, 1.0),
        lambda: X.index_put((torch.tensor([0]),), X[:1]),
        lambda: nn.functional.embedding(torch.tensor([1, 2]), X),
        lambda: HALF.float().double(),
        lambda: X.argmax(-1) + 1,
        lambda: torch.arange(5) * 3 // 2,
        lambda: (X.topk(2).indices, X.sort().values, torch.equal(X, X)),
    ],
)
def test_moving_choosing_and_counting_is_not_arithmetic(work: Callable[[], object]) -> None:
    assert seen(work) == []


def test_an_operator_of_another_library_is_a_closed_box_unless_it_is_python() -> None:
    (closed,) = seen(lambda: torch.ops.census_test.closed(X))
    assert (closed.operator, closed.kind) == ("census_test::closed", "foreign")
    (opened,) = seen(lambda: torch.ops.census_test.opened(X))
    assert (opened.operator, opened.kind) == ("aten::mul", "arithmetic")
    assert "tests/adapters/test_census.py" in opened.stack[0]


def test_a_cast_is_exact_only_where_every_value_survives_it() -> None:
    yes = [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float64),
        (torch.int8, torch.bfloat16),
        (torch.int32, torch.float64),
        (torch.bool, torch.float16),
    ]
    no = [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.bfloat16),
        (torch.int32, torch.float32),
        (torch.int64, torch.float64),
        (torch.float32, torch.int64),
        (torch.float16, torch.float8_e4m3fn),
    ]
    assert [c for c in yes if not exact_cast(*c)] == []
    assert [c for c in no if exact_cast(*c)] == []


@pytest.fixture(scope="module")
def _group() -> Any:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("work", "operator"),
    [
        (dist.all_reduce, "c10d::allreduce_"),
        (lambda x: dist.all_reduce(x, op=dist.ReduceOp.PRODUCT), "c10d::allreduce_"),
        (lambda x: dist.reduce(x, 0), "c10d::reduce_"),
        (lambda x: dist.reduce_scatter_tensor(x.clone(), x), "c10d::_reduce_scatter_base_"),
        (
            lambda x: torch.ops._c10d_functional.all_reduce(x, "sum", world()),
            "_c10d_functional::all_reduce",
        ),
    ],
)
@pytest.mark.usefixtures("_group")
def test_a_collective_that_adds_is_seen(work: Callable[[Tensor], object], operator: str) -> None:
    (found,) = [e for e in seen(lambda: work(X.clone())) if e.operator != "aten::clone"]
    assert (found.operator, found.kind) == (operator, "collective")


@pytest.mark.parametrize(
    "work",
    [
        lambda x: dist.all_reduce(x, op=dist.ReduceOp.MAX),
        lambda x: dist.all_gather([torch.empty_like(x)], x),
        lambda x: dist.broadcast(x, 0),
        lambda x: dist.all_reduce(x.view(torch.int32)),
        lambda x: torch.ops._c10d_functional.all_reduce(x, "max", world()),
    ],
)
@pytest.mark.usefixtures("_group")
def test_a_collective_in_which_order_cannot_matter_is_not(work: Callable[[Tensor], object]) -> None:
    assert seen(lambda: work(X.clone())) == []


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.inner(x)


def test_a_place_is_named_by_module_stack_dtype_shape_and_count() -> None:
    net = Net()
    with torch.no_grad():
        found = {e.operator: e for e in seen(lambda: (net(X), net(X[:2])), net)}
    linear = found["aten::addmm"]
    assert (linear.module, linear.dtype, linear.calls) == ("inner", "float32", 4)
    assert linear.shapes == ("[4, 6]", "[2, 6]")
    assert "test_census.py:" in linear.stack[0]
    assert linear.stack[0].endswith("Net.forward")
    assert found["aten::mul"].module == "Net"  # the root has no path


def test_arithmetic_in_backward_is_seen_with_the_module_and_the_line_that_made_it() -> None:
    net = Net()
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        found = seen(lambda: net(X).backward(torch.ones(4, 6)), net)
    backward = [e for e in found if e.node]
    mul = next(e for e in backward if e.node == "MulBackward0")
    assert mul.operator == "aten::mul"
    assert "test_census.py:" in mul.stack[0]
    assert mul.stack[0].endswith(" forward")
    linear = [e for e in backward if e.node == "AddmmBackward0"]
    assert {"aten::mm", "aten::sum"} <= {e.operator for e in linear}
    assert {e.module for e in linear if e.operator == "aten::mm"} == {"inner"}


def test_a_kernel_of_ours_is_inside_and_so_is_its_gradient() -> None:
    weight = torch.ones(6, requires_grad=True)
    from isoexec.kernels.rms_norm import rms_norm_grad

    recorder = Recorder("case", {})
    with recorder.watching():
        rms_norm(X, weight.detach(), 1e-6)
        rms_norm_grad(X, weight, 1e-6).backward(torch.ones_like(X))
    assert recorder.entries() == []
    assert recorder.inside >= 3


def test_what_a_region_does_is_inside_only_while_it_runs_and_only_by_our_own_code() -> None:
    # this file is not of the package: a foreign function within a marked region is outside all the same
    assert names(seen(lambda: X * 2, inside=lambda: True)) == ["aten::mul"]


def entry(**change: Any) -> CensusEntry:
    values: dict[str, Any] = {
        "case": "engine_decode",
        "operator": "aten::div_",
        "kind": "arithmetic",
        "module": "sampler",
        "dtype": "float32",
        "calls": 2,
        "stack": ("a.py:1 f",),
    }
    return CensusEntry(**{**values, **change})


def judged(entries: list[CensusEntry], *allowed: Allowed, **inside: int) -> Census:
    return Census.of(
        entries, inside or {"engine_decode": 9}, allowed, runtime="vllm", versions={}, contract=None
    )


TEMPERATURE = Allowed(operator="aten::div_", module="sampler", reason="decides a token")


def test_an_allowed_place_keeps_its_reason_and_only_that_place_is_allowed() -> None:
    census = judged([entry(), entry(module="model.layers.0"), entry(operator="aten::div")], TEMPERATURE)
    assert [e.reason for e in census.allowed] == ["decides a token"]
    assert {(e.operator, e.module) for e in census.outside} == {
        ("aten::div_", "model.layers.0"),
        ("aten::div", "sampler"),
    }
    assert not census.clean
    assert judged([entry()], TEMPERATURE).clean


def test_an_allow_list_entry_that_nothing_uses_is_stale_and_not_clean() -> None:
    census = judged([], TEMPERATURE)
    assert census.stale == ("aten::div_ in sampler: decides a token",)
    assert not census.clean
    assert judged([], Allowed(operator="x", module="y", reason="z", optional=True)).clean
    assert judged([], Allowed(operator="x", module="y", reason="z", cases=("trainer_fwd",))).clean


def test_a_case_in_which_no_region_ran_is_not_clean() -> None:
    assert not judged([], engine_decode=0).clean
    assert not Census.of([], {}, (), runtime="vllm", versions={}, contract=None).clean


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- {operator: aten::mul, module: x}", "entry 1: no reason"),
        ("- {operator: aten::mul, module: x, reason: '  '}", "entry 1: no reason"),
        ("- {operator: '', module: x, reason: y}", "entry 1: no operator"),
        ("- {operator: a, module: x, reason: y, why: z}", "unknown \\['why'\\]"),
        ("operator: a", "wanted a list"),
    ],
)
def test_an_allow_list_without_reasons_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "census.yaml"
    path.write_text(text)
    with pytest.raises(CensusError, match=words):
        load_allowed(path)


def test_a_census_survives_its_journey_between_processes() -> None:
    census = judged([entry(), entry(module="m", shapes=("[1]",), node="n")], TEMPERATURE)
    assert Census.from_dict(json.loads(json.dumps(census.to_dict()))) == census
    text = census.text()
    assert "2 outside, in 1 places" in text
    assert "a.py:1 f" in text
    assert "decides a token" in text


def test_what_moves_and_what_carries_is_written_down_and_does_not_overlap_with_sums() -> None:
    assert not {"add", "mul", "mm", "sum", "div", "exp", "index_add", "scatter_add", "cumsum"} & MOVES
    assert not {"allreduce_", "reduce_", "reduce_scatter_", "all_reduce", "reduce_scatter_tensor"} & CARRIES
