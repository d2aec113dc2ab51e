# SPDX-License-Identifier: Apache-2.0
"""cuDNN's gradient of the sm90 attention without a GPU: its sizes, the calls of the library, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")

from isoexec.kernels.attention.hopper import ops as attention
from isoexec.kernels.attention_cudnn.hopper import frontend, ops
from isoexec.kernels.domain import DomainError

BF16 = torch.bfloat16
STEP = {"requests": 2, "tokens": 40, "most_rows": 39, "most_keys": 39, "kv_segment": 4096, "device": "meta"}


class Node:
    """A tensor of a graph, and what was said of it."""

    def __init__(self, like: Any = None) -> None:
        self.like = like
        self.said: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        def say(value: Any) -> Node:
            self.said[name] = value
            return self

        return say


class Library:
    """The frontend, which notes what it is asked for."""

    __version__ = "1.2"
    data_type = SimpleNamespace(FLOAT="fp32", BFLOAT16="bf16")
    heur_mode = SimpleNamespace(A="A", FALLBACK="fallback")

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.ends = [Node(), Node(), Node()]

    def pygraph(self, **given: Any) -> Library:
        self.calls.append(("pygraph", given))
        return self

    def tensor_like(self, x: torch.Tensor) -> Node:
        return Node(x)

    def sdpa_backward(self, **given: Any) -> list[Node]:
        self.calls.append(("sdpa_backward", given))
        return self.ends

    def get_workspace_size(self) -> int:
        return 48

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **more: self.calls.append((name, (*given, *more.values())))


def test_sizes_are_few_and_little_more_than_what_is_asked_for() -> None:
    sizes = [frontend.padded(n) for n in range(1, 40_000)]
    assert sizes == sorted(sizes)
    assert all(size >= n and size % 128 == 0 for n, size in enumerate(sizes, 1))
    assert all(frontend.padded(size) == size for size in set(sizes))
    assert all(size <= n * 17 / 16 + 1 for n, size in enumerate(sizes, 1) if n >= 2048)
    assert len(set(sizes)) < 100


def test_the_graph_is_one_node_of_causal_deterministic_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(frontend, "load", lambda: library)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    given = {
        name: torch.zeros(1, 128, heads, 64, dtype=BF16)
        for name, heads in zip("qkvog", (4, 2, 2, 4, 4), strict=True)
    }
    given["dO"] = given.pop("g")
    stats = torch.zeros(1, 4, 128)
    graph = frontend.Graph.build(given, stats, scale=0.125, handle="handle")
    asked = dict(library.calls)["sdpa_backward"]
    assert {n: tuple(x.like.shape) for n, x in asked.items() if isinstance(x, Node)} == {
        **dict.fromkeys(("q", "o", "dO"), (1, 4, 128, 64)),
        **dict.fromkeys(("k", "v"), (1, 2, 128, 64)),
        "stats": (1, 4, 128, 1),
    }
    assert asked["attn_scale"] == 0.125
    assert asked["use_causal_mask"] is asked["use_deterministic_algorithm"] is True
    assert [end.said["set_dim"] for end in library.ends] == [[1, n, 128, 64] for n in (4, 2, 2)]
    assert library.ends[1].said["set_stride"] == [128 * 2 * 64, 64, 2 * 64, 1]
    assert [name for name, _ in library.calls][2:] == [
        *("validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans")
    ]
    to = tuple(torch.empty_like(given[name]) for name in "qkv")
    graph.run(given, stats, to, torch.empty(graph.workspace, dtype=torch.uint8))
    assert ("set_stream", ("handle", 7)) in library.calls
    (pack, room, handle) = library.calls[-1][1]
    assert (len(room), handle) == (48, "handle")
    assert {tuple(x.shape) for x in pack.values()} == {(1, 4, 128, 64), (1, 2, 128, 64), (1, 4, 128, 1)}
    assert [pack[end].data_ptr() for end in library.ends] == [x.data_ptr() for x in to]


def test_without_the_library_or_a_certified_build_no_gradient_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert ops.plan(**STEP).gradient == "cudnn"  # type: ignore[arg-type]
    frontend.load.cache_clear()
    monkeypatch.setattr(frontend, "import_module", lambda _: (_ for _ in ()).throw(ImportError("no cudnn")))
    with pytest.raises(frontend.LibraryMissingError, match=r"no cudnn. Install nvidia-cudnn-frontend"):
        ops.plan(**STEP, gradients=True)  # type: ignore[arg-type]
    monkeypatch.setattr(frontend, "identity", lambda: "cudnn 1")
    with pytest.raises(
        DomainError, match=r"cudnn 1, which nothing has certified; .* then a line in frontend.BUILDS"
    ):
        ops.plan(**STEP, gradients=True)  # type: ignore[arg-type]
    monkeypatch.setattr(frontend, "_admitted", set())
    frontend.admit("cudnn 1")
    step = ops.plan(**STEP, gradients=True)  # type: ignore[arg-type]
    assert step.units is not None
    assert attention.plan(**STEP, gradients=True).gradient == "own"  # type: ignore[arg-type]


def _inputs(rows: int, D: int) -> tuple[torch.Tensor, ...]:
    q, k = torch.zeros(rows, 4, D, dtype=BF16), torch.zeros(rows, 2, D, dtype=BF16)
    return q, q, k, k, q, torch.zeros(4, rows)


def _spans(rows: int, keys: int) -> torch.Tensor:
    return torch.tensor([[0], [rows], [keys], [0]], dtype=torch.int32)


def test_what_it_does_not_compute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel: Any = ops._grad
    units, x = torch.zeros(2, 1, dtype=torch.int32), _inputs(5, 64)
    with pytest.raises(DomainError, match="refuses 5 rows of a sequence of 6 keys"):
        kernel(*x, _spans(5, 6), units, None, 0.1, 0, 5)
    with pytest.raises(DomainError, match="refuses a window of 3"):
        kernel(*x, _spans(5, 5), units, None, 0.1, 3, 5)
    with pytest.raises(DomainError, match="refuses sinks"):
        kernel(*x, _spans(5, 5), units, torch.zeros(4), 0.1, 0, 5)
    with pytest.raises(DomainError, match=r"heads of 96; it is defined for head dims \[64, 128, 256\]"):
        kernel(*_inputs(5, 96), _spans(5, 5), units, None, 0.1, 0, 5)
    wide = SimpleNamespace(workspace=frontend.MOST_WORKSPACE + 1)
    monkeypatch.setattr(frontend, "_graph", lambda *_: wide)
    with pytest.raises(DomainError, match=r"34359738369 bytes of workspace.* bind attention.mma_segments/1"):
        kernel(*x, _spans(5, 5), units, None, 0.1, 0, 5)


def test_sequences_without_rows_cost_no_call_and_rows_of_none_get_zeros(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frontend, "gradients", lambda *x, **_: [y.fill_(1.0) for y in x[6]])
    spans = torch.tensor([[0, 2, 2], [2, 0, 1], [2, 0, 1], [1, 3, 3]], dtype=torch.int32)
    kernel: Any = ops._grad
    dq, dk, dv, none = kernel(*_inputs(5, 64), spans, spans[:2], None, 0.1, 0, 2)
    assert dq[:, 0, 0].tolist() == [1, 1, 1, 0, 0]
    assert dk[:, 0, 0].tolist() == dv[:, 0, 0].tolist() == [0, 1, 1, 1, 0]
    assert none.numel() == 0
