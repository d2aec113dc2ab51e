# SPDX-License-Identifier: Apache-2.0
"""A step's segments by calls of the library, and their merge: what attention over keys and over latent rows have in common."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch

from isoexec.kernels.attention.hopper.kernel import launch_merge
from isoexec.kernels.domain import require

if TYPE_CHECKING:
    from torch import Tensor

    from isoexec.kernels.attention.hopper import fa3

__all__ = ["Attend", "Tables", "by_library", "check_rows", "kept", "lines", "merged", "nothing"]

SIDE_STREAMS = (
    1  # on which past segments are computed beside the own ones: one call fills the other's last wave
)


class Attend(Protocol):
    """One call of the library over the entries of a table, of so many copies of the queries one after the other.

    (out [copies * T, H, V] bf16, into `out` where it is given, lse [H, copies * T] fp32).
    """

    def __call__(
        self,
        copies: int,
        table: Tensor,
        pages: Tensor | None,
        path: fa3.Path3,
        rows: int,
        out: Tensor | None = None,
        /,
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, kw_only=True)
class Tables:
    """A plan's tables of the library's calls, and what says how they are laid out; `past` is the path beyond a segment."""

    own: Tensor
    own_pages: Tensor | None
    others: Tensor
    other_pages: Tensor | None
    past: fa3.Path3
    requests: int
    kv_segment: int
    most_rows: int
    single: bool
    folded: bool


def lines(*shape: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """An empty tensor whose last dimension lies in lines of 16, so that kernels know the same of it whatever its length."""
    return torch.empty(*shape[:-1], -(-shape[-1] // 16) * 16, dtype=dtype, device=device)[..., : shape[-1]]


def check_rows(op: str, rows: int, position: Tensor, tokens: int) -> None:
    """Raise `DomainError` unless there are the plan's rows, and an int32 position for each."""
    require(
        tokens == rows
        and position.shape == (rows,)
        and position.dtype == torch.int32
        and position.is_contiguous(),
        op,
        f"{rows} rows, positions {list(position.shape)} {position.dtype}",
        f"the plan's {tokens} rows and an int32 position for each",
    )


def nothing(q: Tensor, with_lse: bool) -> tuple[Tensor, Tensor]:
    """What an op returns for q [T, H, V]: shapes and dtypes; empty where T is 0 or values do not matter."""
    lse = q.new_empty((q.shape[1], q.shape[0]) if with_lse else (0,), dtype=torch.float32)
    return q.new_empty(q.shape), lse


def kept(lse: Tensor | None, with_lse: bool) -> Tensor:
    """The log-sum-exps that an op returns: none unless they are wanted."""
    assert lse is not None or not with_lse
    return lse if lse is not None and with_lse else torch.empty(0, dtype=torch.float32)


def merged(
    parts: Tensor,
    lse: Tensor,
    position: Tensor,
    sinks: Tensor | None,
    *,
    kv_segment: int,
    with_lse: bool,
    hardware: bool,
    window: int = 0,
    totals: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Parts [n, T, H, V], lse [n, H, T] and `totals` still to be divided by, as `launch_merge` takes them, in one; lse [H, T]."""
    out = torch.empty(parts.shape[1:], dtype=torch.bfloat16, device=parts.device)
    whole = torch.empty(lse.shape[1:], dtype=torch.float32, device=lse.device) if with_lse else None
    launch_merge(
        *(None, None, parts, lse, position, sinks, out),
        kv_segment=kv_segment,
        window=window,
        totals=totals,
        whole_lse=whole,
        hardware=hardware,
    )
    return out, kept(whole, with_lse)


@cache
def _side_streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    return tuple(torch.cuda.Stream(device) for _ in range(SIDE_STREAMS if device.type == "cuda" else 0))


def by_library(
    attend: Attend,
    like: Tensor,
    position: Tensor,
    sinks: Tensor | None,
    tables: Tables,
    *,
    with_lse: bool,
    hardware: bool,
) -> tuple[Tensor, Tensor]:
    """Every row of `like` [T, H, V] bf16 over the segments it has: (bf16 [T, H, V], lse [H, T] where it is wanted)."""
    T, H, V = like.shape
    requests, kv_segment = tables.requests, tables.kv_segment

    def slots_of(many: Tensor, lse: Tensor, n: int) -> tuple[Tensor, Tensor]:
        return many.view(n, T, H, V), lse.view(H, n, T).transpose(0, 1)

    if tables.single:
        n = (tables.own.shape[1] - 1) // requests
        found = attend(n, tables.own, tables.own_pages, "causal", 1)
        if n == 1 and sinks is None:
            return found[0], kept(found[1], with_lse)
        given = {"kv_segment": kv_segment, "with_lse": with_lse, "hardware": hardware}
        return merged(*slots_of(*found, n), position, sinks, **given)  # type: ignore[arg-type]
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    n = (tables.others.shape[1] - 1) // requests if tables.others.numel() else 0
    parts = torch.empty(0 if tables.folded else n, T, H, V, dtype=like.dtype, device=like.device)
    streams = _side_streams(like.device) if n and not tables.folded else ()
    main = torch.cuda.current_stream(like.device) if streams else None

    def beside(j: int) -> AbstractContextManager[object]:
        return torch.cuda.stream((main, *streams)[(j + 1) % (len(streams) + 1)]) if streams else nullcontext()

    for stream in streams:  # after the last allocation: side streams write what was only then handed out
        assert main is not None
        stream.wait_stream(main)
    most = min(tables.most_rows, kv_segment)
    _, own_lse = attend(1, tables.own, tables.own_pages, "causal", most, out)
    if n == 0 and sinks is None:
        return out, kept(own_lse, with_lse)
    if n == 0:
        # no row has a past segment: nothing of them is read
        parts, slots = out.unsqueeze(0), own_lse.unsqueeze(0)
    elif tables.folded:
        parts, slots = slots_of(
            *attend(n, tables.others, tables.other_pages, tables.past, tables.most_rows), n
        )
    else:
        lses = []
        for j in range(n):
            of = slice(j * requests, (j + 1) * requests)
            table = tables.others[:, of.start : of.stop + 1]
            some = None if tables.other_pages is None else tables.other_pages[of]
            with beside(j):
                lses.append(attend(1, table, some, tables.past, tables.most_rows, parts[j])[1])
        for stream in streams:
            assert main is not None
            main.wait_stream(stream)
        slots = torch.stack(lses)
    launch_merge(
        *(out, own_lse, parts, slots, position, sinks, out),
        kv_segment=kv_segment,
        whole_lse=own_lse if with_lse else None,
        hardware=hardware,
    )
    return out, kept(own_lse, with_lse)
