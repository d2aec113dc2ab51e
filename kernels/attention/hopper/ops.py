# SPDX-License-Identifier: Apache-2.0
"""The sm90 attention as one opaque torch op over segments that FlashAttention-3 computes; forward only.

A step's `Plan` is made once and used by every layer. Its tables lie on the device and are filled there, so a CUDA graph may
hold both `fill` and the op: what changes from step to step is in tensors, what is in integers are upper bounds.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from isoexec.kernels.attention.hopper import fa3
from isoexec.kernels.attention.hopper.kernel import (
    OWN,
    PAST,
    ROWS_OF_TABLE,
    SINGLE,
    launch_merge,
    launch_tables,
)
from isoexec.kernels.attention.hopper.naive import BLOCK
from isoexec.kernels.attention.hopper.split import MOST_GROUP, Tuning, launch_split
from isoexec.kernels.domain import require
from isoexec.kernels.hopper.library import define

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Plan", "attention", "plan"]

MOST_SEGMENTS = 32
_FOLD_ROWS = (
    4096  # query rows up to which all past segments share one call over copies of the queries; free of bits
)

FEW_PROGRAMS = 32  # entries times KV heads up to which decode is split by keys and columns
_SPLIT = Tuning(columns=32, warps=4, stages=9, score_blocks=4, score_warps=4, score_stages=5, ahead=4)
SPLIT = dict.fromkeys(BLOCK, _SPLIT)


def split_for(entries: int, kv_heads: int, group: int, head_dim: int) -> Tuning | None:
    """How few decode entries are split, or None where the library serves them; both have the same bits."""
    few = entries * kv_heads <= FEW_PROGRAMS and group <= MOST_GROUP
    return SPLIT[head_dim] if few else None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The tables of one step: what `attention` is called with.

    `single` says that every request has at most one row, so own and past segments share a call. `most_rows`, `most_keys` and
    the shapes are upper bounds; `fill` refuses nothing that is beyond them, so choose them by the engine's own limits.
    """

    kv_segment: int
    page: int
    requests: int
    tokens: int
    most_rows: int
    single: bool
    folded: bool
    own: Tensor
    own_pages: Tensor | None
    past: Tensor
    past_pages: Tensor | None

    def fill(
        self, q_start: Tensor, lengths: Tensor, *, k_start: Tensor | None = None, blocks: Tensor | None = None
    ) -> None:
        """Write the tables from int32 device tensors: q_start [B + 1], lengths [B] (keys, this step's included).

        Keys lie contiguously from k_start [B] on, or in pages blocks [B, width].
        """
        require(
            (k_start is None) == (self.page > 0) and (blocks is None) == (self.page == 0),
            "sm90_attention",
            "k_start" if blocks is None else "blocks",
            "blocks for a paged plan, k_start for a contiguous one",
        )
        for tensor in (q_start, lengths, k_start, blocks):
            require(
                tensor is None or (tensor.dtype == torch.int32 and tensor.stride(-1) == 1),
                "sm90_attention",
                "" if tensor is None else f"{tensor.dtype}, strides {tensor.stride()}",
                "int32 tables, dense in their last dimension",
            )
        calls: list[tuple[int, Tensor, Tensor | None]] = [
            (SINGLE if self.single else OWN, self.own, self.own_pages)
        ]
        if self.past.numel():
            calls.append((PAST, self.past, self.past_pages))
        for kind, table, pages in calls:
            launch_tables(
                kind,
                q_start,
                lengths,
                k_start,
                blocks,
                table,
                pages,
                tokens=self.tokens,
                kv_segment=self.kv_segment,
                page=self.page,
                folded=kind == SINGLE or (kind == PAST and self.folded),
            )


def plan(
    *,
    requests: int,
    tokens: int,
    most_rows: int,
    most_keys: int,
    kv_segment: int,
    page: int = 0,
    folded: bool | None = None,
    device: torch.device | str = "cuda",
) -> Plan:
    """An empty plan for up to `requests` requests, `tokens` query rows, `most_rows` rows and `most_keys` keys in one request.

    `page` is 0 for contiguous keys. Fixed by these numbers: how many calls of the library, over how many entries.
    """
    require(
        0 < most_rows <= tokens and most_keys > 0 and requests > 0,
        "sm90_attention",
        f"{requests} requests, {tokens} tokens, {most_rows} rows, {most_keys} keys",
        "positive sizes, and no more rows in a request than tokens",
    )
    require(
        kv_segment > 0 and (page == 0 or (page > 0 and kv_segment % page == 0)),
        "sm90_attention",
        f"kv_segment {kv_segment} in pages of {page}",
        "segments of whole pages",
    )
    count = -(-most_keys // kv_segment)
    require(
        count <= MOST_SEGMENTS,
        "sm90_attention",
        f"{most_keys} keys in segments of {kv_segment}",
        f"at most {MOST_SEGMENTS} segments",
    )
    single = most_rows == 1
    fold = tokens <= _FOLD_ROWS if folded is None else folded
    touched = min(count, (most_rows + kv_segment - 2) // kv_segment + 1)

    def table(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.int32, device=device)

    own = requests * (count if single else touched)
    past = 0 if single else requests * (count - 1)
    per = kv_segment // page if page else 0
    return Plan(
        kv_segment=kv_segment,
        page=page,
        requests=requests,
        tokens=tokens,
        most_rows=most_rows,
        single=single,
        folded=fold,
        own=table(ROWS_OF_TABLE, own + 1),
        own_pages=table(own, per) if page else None,
        past=table(ROWS_OF_TABLE, past + 1 if past else 0),
        past_pages=table(past, per) if page else None,
    )


SIDE_STREAMS = (
    1  # on which past segments are computed beside the own ones, so that one call fills the other's last wave
)


@cache
def _side_streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    return tuple(torch.cuda.Stream(device) for _ in range(SIDE_STREAMS if device.type == "cuda" else 0))


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    own: Tensor,
    own_pages: Tensor | None,
    past: Tensor,
    past_pages: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    kv_segment: int,
    requests: int,
    tokens: int,
    most_rows: int,
    single: bool,
    folded: bool,
) -> Tensor:
    T, H, D = q.shape
    require(
        D in BLOCK
        and k.shape[-1] == v.shape[-1] == D
        and H % k.shape[-2] == 0
        and k.shape[:-1] == v.shape[:-1],
        "sm90_attention",
        f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}",
        f"head dims {sorted(BLOCK)}, keys and values of one shape, query heads a multiple of theirs",
    )
    require(
        all(x.dtype == torch.bfloat16 and x.stride(-1) == 1 for x in (q, k, v)),
        "sm90_attention",
        f"{[str(x.dtype) for x in (q, k, v)]}",
        "bfloat16, dense in the last dimension",
    )
    require(
        tokens == T and position.shape == (T,) and position.dtype == torch.int32 and position.is_contiguous(),
        "sm90_attention",
        f"{T} rows, positions {list(position.shape)} {position.dtype}",
        f"the plan's {tokens} rows and an int32 position for each",
    )
    require(
        sinks is None or (sinks.shape == (H,) and sinks.dtype == torch.float32 and sinks.is_contiguous()),
        "sm90_attention",
        "" if sinks is None else f"sinks {list(sinks.shape)} {sinks.dtype}",
        "contiguous fp32 sinks, one a query head",
    )
    if not T:
        return torch.empty_like(q, memory_format=torch.contiguous_format)

    def attend(
        queries: Tensor,
        table: Tensor,
        pages: Tensor | None,
        path: fa3.Path3,
        rows: int,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return fa3.call(
            queries,
            k,
            v,
            table,
            pages,
            scale=scale,
            path=path,
            most_rows=rows,
            most_keys=kv_segment,
            out=out,
        )

    streams = _side_streams(q.device)
    main = torch.cuda.current_stream(q.device) if streams else None

    def beside(j: int) -> AbstractContextManager[object]:
        return torch.cuda.stream((main, *streams)[(j + 1) % (len(streams) + 1)]) if streams else nullcontext()

    def fork() -> None:
        for stream in streams:
            assert main is not None
            stream.wait_stream(main)

    def join() -> None:
        for stream in streams:
            assert main is not None
            main.wait_stream(stream)

    if single:
        n = (own.shape[1] - 1) // requests
        tuning = split_for(own.shape[1] - 1, k.shape[-2], H // k.shape[-2], D)
        if tuning is not None:
            parts, totals, lse = launch_split(
                q, k, v, own, own_pages, requests=requests, kv_segment=kv_segment, scale=scale, tuning=tuning
            )
            out = torch.empty(T, H, D, dtype=q.dtype, device=q.device)
            launch_merge(
                None,
                None,
                parts.view(n, T, H, D),
                lse.view(H, n, T).transpose(0, 1),
                position,
                sinks,
                out,
                kv_segment=kv_segment,
                totals=totals.view(H, n, T).transpose(0, 1),
            )
            return out
        parts, lse = attend(q if n == 1 else q.repeat(n, 1, 1), own, own_pages, "causal", 1)
        if n == 1 and sinks is None:
            return parts
        out = torch.empty(T, H, D, dtype=q.dtype, device=q.device)
        slots = lse.view(H, n, T).transpose(0, 1)
        launch_merge(None, None, parts.view(n, T, H, D), slots, position, sinks, out, kv_segment=kv_segment)
        return out
    out = torch.empty(T, H, D, dtype=q.dtype, device=q.device)
    n = (past.shape[1] - 1) // requests if past.numel() else 0
    parts = torch.empty(0 if folded else n, T, H, D, dtype=q.dtype, device=q.device)
    if n and not folded:
        fork()  # after the last allocation: side streams write what was only then handed out
    _, own_lse = attend(q, own, own_pages, "causal", min(most_rows, kv_segment), out)
    if n == 0 and sinks is None:
        return out
    if n == 0:
        parts, slots = (
            out.unsqueeze(0),
            own_lse.unsqueeze(0),
        )  # no row has a past segment: nothing of them is read
    elif folded:
        many, lse = attend(q if n == 1 else q.repeat(n, 1, 1), past, past_pages, fa3.PAST[D], most_rows)
        parts, slots = many.view(n, T, H, D), lse.view(H, n, T).transpose(0, 1)
    else:
        found = []
        for j in range(n):
            of = slice(j * requests, (j + 1) * requests)
            table = past[:, of.start : of.stop + 1]
            some = None if past_pages is None else past_pages[of]
            with beside(j):
                found.append(attend(q, table, some, fa3.PAST[D], most_rows, parts[j])[1])
        join()
        slots = torch.stack(found)
    launch_merge(out, own_lse, parts, slots, position, sinks, out, kv_segment=kv_segment)
    return out


def _fake(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)


_op = define(
    "sm90_attention(Tensor q, Tensor k, Tensor v, Tensor position, Tensor own, Tensor? own_pages, Tensor past, "
    "Tensor? past_pages, Tensor? sinks, float scale, int kv_segment, int requests, int tokens, int most_rows, "
    "bool single, bool folded) -> Tensor",
    _attention,
    _fake,
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    step: Plan,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of a step's rows: q [T, H, D] bf16 at `position` [T] int32, by a filled plan; [T, H, D] bf16.

    k and v are [keys, KV, D], or [pages, page, KV, D] for a paged plan; this step's keys are among them. `sinks` [H] fp32 are
    logits without a value. Raises `DomainError` outside head dims 64, 128, 256 and `fa3.LibraryMissingError` without the library.
    """
    out: Tensor = _op(
        q,
        k,
        v,
        position,
        step.own,
        step.own_pages,
        step.past,
        step.past_pages,
        sinks,
        scale,
        step.kv_segment,
        step.requests,
        step.tokens,
        step.most_rows,
        step.single,
        step.folded,
    )
    return out
