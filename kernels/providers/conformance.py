# SPDX-License-Identifier: Apache-2.0
"""Compares a library's call with the function's reference as integers, and keeps examples of elements that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from isoexec.kernels import registry
from isoexec.kernels.gates.checking import Run, bits
from isoexec.kernels.gates.forward import many
from isoexec.kernels.gates.inputs import DTYPES, ids, nudged

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Watched", "conformance"]

Call = Callable[..., "Tensor"]
Value = str | int | bool

MOST_EXAMPLES = 4


class Watched(Run):
    """A run that keeps the first elements that differ, in words."""

    def __init__(self, *, constants: Mapping[str, Value], full: bool, device: torch.device) -> None:
        super().__init__(constants=constants, full=full, device=device)
        self.at = ""
        self.examples: list[str] = []

    def equal(
        self, got: Tensor | Sequence[Tensor], want: Tensor | Sequence[Tensor], *, any_nan: bool = False
    ) -> None:
        """As `Run.equal`; where bits differ, note where and which."""
        super().equal(got, want, any_nan=any_nan)
        pairs = [(got, want)] if isinstance(got, torch.Tensor) else zip(got, want, strict=True)
        for a, b in pairs:
            assert isinstance(a, torch.Tensor)
            assert isinstance(b, torch.Tensor)
            if len(self.examples) >= MOST_EXAMPLES:
                return
            if a.shape != b.shape or a.dtype != b.dtype:
                self.examples.append(
                    f"{self.at}: {list(a.shape)} {a.dtype}, wanted {list(b.shape)} {b.dtype}"
                )
                continue
            for flat in (bits(a) != bits(b)).nonzero().view(-1)[:2].tolist():
                place = [int(i) for i in torch.unravel_index(torch.tensor(flat), a.shape)]
                mask = (1 << 8 * a.dtype.itemsize) - 1
                x, y = (int(bits(t)[flat]) & mask for t in (a, b))
                values = f"{float(a.reshape(-1)[flat])!r}, wanted {float(b.reshape(-1)[flat])!r}"
                self.examples.append(f"{self.at} at {place}: {values} (bits {x:#x}, wanted {y:#x})")


def conformance(run: Watched, function: str, call: Call) -> None:
    """Run the comparison for a function: its own below, else canary inputs of many sizes."""
    body = _OWN.get(function)
    if body is not None:
        body(run, call)
    else:
        _canaries(run, function, call)


def _canaries(run: Watched, function: str, call: Call) -> None:
    reference = registry.reference(function, run.constants)
    for dtype in run.over("dtype", DTYPES):
        for tokens in run.over("rows", run.pick((1, 19, 64), (1, 2, 3, 16, 17, 19, 64, 65, 130, 257))):
            run.at = f"{str(dtype)[6:]}, {tokens} rows"
            inputs = registry.canary(function, run.constants, dtype=dtype, sizes={"tokens": tokens})
            run.equal(call(**inputs), reference(**inputs))
        name = next(n for n, v in inputs.items() if isinstance(v, torch.Tensor) and v.is_floating_point())
        run.control(
            "the_next_number_up_in_one_of_seven",
            reference(**{**inputs, name: nudged(inputs[name])}),
            reference(**inputs),
        )


def _embedding(run: Watched, call: Call) -> None:
    reference = registry.reference("embedding.lookup/1", run.constants)
    for dtype in run.over("dtype", DTYPES):
        for vocab, width in ((7, 1), (64, 33), (512, 1024)):
            run.covers(table=f"{vocab}x{width}")
            w = many(run, vocab, width, salt=1, dtype=dtype)
            w[:, 0] = -0.0
            w[0, -1] = float("inf")
            for tokens in run.over("rows", run.pick((0, 1, 64), (0, 1, 2, 19, 64, 257, 1024))):
                run.at = f"{str(dtype)[6:]}, {tokens} rows of {vocab}x{width}"
                at = ids(tokens, vocab, 2).to(run.device)
                run.equal(call(at, w), reference(at, w))
            run.control("the_next_row", call((at + 1) % vocab, w), reference(at, w))


def _mma_chain(run: Watched, call: Call) -> None:
    """Every weight of the table and number of rows; a provider may refuse one row, which its record then lacks."""
    from isoexec.kernels.linear.hopper import gate
    from isoexec.kernels.linear.hopper.kernel import reference

    dtype = gate.out_dtype(run)
    for N, K in gate.weights(run):
        x, w = gate.operands(run, gate.MOST, N, K)
        want = reference(x, w, dtype)
        for M in run.over("rows", [m for m in run.pick(gate.ROWS[1::5], gate.ROWS) if m > 1]):
            run.at = f"{M} rows of {N}x{K}"
            run.equal(call(x[:M], w), want[:M])
        del x, w, want
    gate.chain_controls(run)


# experts, rows of a weight, columns, tokens, experts a token: Qwen3.5-35B-A3B and Qwen3-30B-A3B, many tokens and few
_GROUPS = (
    (256, 1024, 2048, 8192, 8),
    (256, 2048, 512, 8192, 8),
    (128, 1536, 2048, 4096, 8),
    (128, 2048, 768, 4096, 8),
    (256, 1024, 2048, 64, 8),
    (256, 2048, 512, 64, 8),
    (256, 1024, 2048, 1, 8),
)


def _grouped(run: Watched, call: Call) -> None:
    from isoexec.kernels.linear.hopper.kernel import reference

    run.covers(dtype=torch.bfloat16)
    for experts, N, K, tokens, top in run.pick(_GROUPS[4:], _GROUPS):
        run.covers(weights=f"{experts}x{N}x{K}", tokens=tokens)
        rows = tokens * top
        x = many(run, rows, K, salt=1)
        w = many(run, experts, N, K, salt=2, scale=(3 / K) ** 0.5)
        chosen = ids(rows, experts, 5) if tokens > 1 else torch.arange(rows) * 31 % experts
        chosen[: rows // 4] = chosen[0]  # one expert has many rows, and some have none
        count = torch.bincount(chosen, minlength=experts)
        ends = count.cumsum(0).to(torch.int32)
        run.at = f"{tokens} tokens, {experts} experts of {N}x{K}"
        got = call(x, w, ends.to(run.device))
        begin, want = 0, torch.full_like(got, float("nan"))
        for expert, end in enumerate(ends.tolist()):
            if end > begin:
                want[begin:end] = reference(x[begin:end].contiguous(), w[expert])
            begin = end
        run.equal(got, want)
        run.control("the_next_expert", call(x, w.roll(1, 0), ends.to(run.device)), want)
        halves = [
            call(x[:, i::2].contiguous(), w[..., i::2].contiguous(), ends.to(run.device)) for i in (0, 1)
        ]
        run.control("k_in_two_sums", halves[0] + halves[1], want)


# query heads, KV heads, head dim; sequences of so many keys, in segments of S, and rows of which each end is computed alone
_HEADS = ((8, 2, 128), (8, 1, 256), (8, 2, 64), (4, 4, 128), (12, 2, 256))
_LATENT_HEADS = (16, 5, 20)
_BEYOND = 777
_ROWS = (1, 2, 13, 300)
_PAGE = 64


def _lengths(run: Watched, S: int) -> list[int]:
    return [1, 64, 65, 700, *run.pick((S + _BEYOND,), (S, S + 1, 2 * S + _BEYOND))]


def _ends(
    run: Watched, call: Call, queries: list[Tensor], rest: list[Tensor], scale: float, want: Tensor
) -> None:
    """All rows packed, then the last of them over the same keys in pages, as chunks, drafts and decode are computed."""
    n, at = len(want), run.at
    run.at = f"{at}, packed"
    run.equal(call(*queries, *rest, scale), want)
    for rows in run.over("rows", [r for r in _ROWS if r <= n]):
        run.at = f"{at}, the last {rows} rows through pages"
        run.equal(call(*(q[-rows:] for q in queries), *rest, scale, page=_PAGE), want[-rows:])


def _segments(run: Watched, call: Call) -> None:
    from isoexec.kernels.attention.hopper.gate import native
    from isoexec.kernels.attention.hopper.reference import reference

    S = int(run.constants["kv_segment"])
    run.covers(dtype=torch.bfloat16)
    for H, KV, D in run.pick(_HEADS[:3], _HEADS):
        run.covers(heads=f"{H}/{KV}x{D}")
        for n in run.over("keys", _lengths(run, S)):
            q = many(run, n, H, D, salt=1, scale=3.0)
            k, v = (many(run, n, KV, D, salt=salt, scale=2.0) for salt in (20, 40))
            run.at = f"{H}/{KV} heads of {D}, {n} keys"
            want, _ = reference(q, k, v, D**-0.5, kv_segment=S)
            _ends(run, call, [q], [k, v], D**-0.5, want)
        run.control("another_segment", reference(q, k, v, D**-0.5, kv_segment=2 * S)[0], want)
        cu = torch.tensor([0, n], dtype=torch.int32, device=run.device)
        run.control("its_own_schedule", native(q, k, v, cu, n, n, cu_k=cu), want)


def _latent_segments(run: Watched, call: Call) -> None:
    from isoexec.kernels.latent_attention.hopper.naive import LATENT, ROPE
    from isoexec.kernels.latent_attention.hopper.reference import reference

    S, scale = int(run.constants["kv_segment"]), 192**-0.5
    run.covers(dtype=torch.bfloat16)
    for H in run.over("heads", run.pick(_LATENT_HEADS[:1], _LATENT_HEADS)):
        for n in run.over("keys", _lengths(run, S)):
            queries = [many(run, n, H, width, salt=salt) for width, salt in ((ROPE, 1), (LATENT, 2))]
            rows = [many(run, n, width, salt=salt, scale=2.0) for width, salt in ((ROPE, 20), (LATENT, 40))]
            run.at = f"{H} heads, {n} keys"
            want, _ = reference(*queries, *rows, scale, kv_segment=S)  # type: ignore[misc, arg-type]
            _ends(run, call, queries, rows, scale, want)
        for name, other in (("latent_part_first", {"latent_first": True}), ("blocks_of_32", {"keys": 32})):
            run.control(name, reference(*queries, *rows, scale, kv_segment=S, **other)[0], want)  # type: ignore[misc, arg-type]
        run.control("another_segment", reference(*queries, *rows, scale, kv_segment=2 * S)[0], want)  # type: ignore[misc, arg-type]


_OWN: dict[str, Callable[[Watched, Call], None]] = {
    "attention.latent_segments/1": _latent_segments,
    "attention.mma_segments/1": _segments,
    "embedding.lookup/1": _embedding,
    "linear.mma_chain/1": _mma_chain,
    "linear.grouped_mma_chain/1": _grouped,
}
