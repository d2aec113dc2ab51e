# SPDX-License-Identifier: Apache-2.0
"""Two and four real ranks, with and without sequence parallelism, have the bits of one, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.distributed import ProcessGroup
from torch.multiprocessing.spawn import start_processes

from isoexec.kernels.canaries import fill
from isoexec.kernels.domain import DomainError
from isoexec.kernels.embedding import vocab_parallel_embedding
from isoexec.kernels.grad_norm import exact_sq_sum
from isoexec.kernels.linear import chain, column_linear, hand_off, pack_weight, row_linear
from isoexec.kernels.logprobs import token_logprobs
from isoexec.kernels.rms_norm import rms_norm_grad

Differing = Callable[[Tensor, Tensor], int]
Results = dict[str, list[Tensor]]
Case = tuple[Results, list[Results]]

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [2, 4]
S, B, HIDDEN, FFN, VOCAB = 20, 3, 128, 256, 512
IDS = (torch.arange(S * B) * 37 % VOCAB).view(S, B)


def _part(x: Tensor, dim: int, rank: int, size: int) -> Tensor:
    return x.chunk(size, dim)[rank].clone()


def _gate_up(w: Tensor, rank: int, size: int) -> Tensor:
    """[gate; up] of the whole layer -> [gate_r; up_r] of one rank."""
    gate, up = w.chunk(2, 0)
    return torch.cat([_part(gate, 0, rank, size), _part(up, 0, rank, size)])


def _with_grads(call: Callable[..., Tensor], inputs: Sequence[Tensor], g: Tensor) -> list[Tensor]:
    inputs = [t.clone().requires_grad_() for t in inputs]
    out = call(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, g)]


def _run(
    dtype: torch.dtype, rank: int, size: int, group: ProcessGroup | None
) -> dict[str, list[torch.Tensor]]:
    """Every sharded op on one rank; with size 1 the whole."""
    x, w_out = fill(S, B, HIDDEN, salt=1, dtype=dtype), fill(VOCAB, HIDDEN, salt=2, dtype=dtype)
    w_fc1, w_fc2 = fill(2 * FFN, HIDDEN, salt=3, dtype=dtype), fill(HIDDEN, FFN, salt=4, dtype=dtype)
    h, gamma = fill(S, B, FFN, salt=5, dtype=dtype), fill(HIDDEN, salt=6, dtype=dtype)
    heads, gamma_qk = fill(S, B, 4, 32, salt=7, dtype=dtype), fill(32, salt=8, dtype=dtype)
    g_x, g_h = fill(S, B, HIDDEN, salt=9, dtype=dtype), fill(S, B, 2 * FFN, salt=10, dtype=dtype)
    g_out, g_heads = fill(S, B, VOCAB, salt=11), fill(S, B, 4, 32, salt=12, dtype=dtype)
    many, w_many = fill(1300, FFN, salt=13, dtype=dtype), fill(32, FFN, salt=14, dtype=dtype)
    logits, g_token = fill(S, B, VOCAB, salt=15, scale=9.0), fill(S, B, salt=16)

    def shard(t: Tensor, dim: int) -> Tensor:
        return _part(t, dim, rank, size)

    done: dict[str, list[torch.Tensor]] = {}
    for sp in (False, True) if size > 1 else (False,):
        tag = "/sp" if sp else ""
        column = partial(column_linear, k_block=64, group=group, sequence_parallel=sp)
        row = partial(row_linear, k_block=64, group=group, sequence_parallel=sp)
        lookup = partial(
            vocab_parallel_embedding,
            IDS,
            vocab_start=rank * VOCAB // size,
            group=group,
            sequence_parallel=sp,
        )
        x_in, g_in = (_part(t, 0, rank, size) if sp else t for t in (x, g_x))
        done["fc1" + tag] = _with_grads(
            partial(column, interleave=2),
            [x_in, _gate_up(w_fc1, rank, size)],
            _gate_up(g_h.permute(2, 0, 1), rank, size).permute(1, 2, 0),
        )
        done["head" + tag] = _with_grads(
            partial(column, out_dtype=torch.float32), [x_in, shard(w_out, 0)], shard(g_out, 2)
        )
        done["fc2" + tag] = _with_grads(row, [shard(h, 2), shard(w_fc2, 1)], g_in)
        done["embedding" + tag] = _with_grads(lookup, [shard(w_out, 0)], g_in)
    done["norm/sp"] = _with_grads(
        lambda a, w: rms_norm_grad(a, w, 1e-6, shard="sequence", group=group),
        [shard(x, 0), gamma],
        shard(g_x, 0),
    )
    done["qk_norm"] = _with_grads(
        lambda a, w: rms_norm_grad(a, w, 1e-6, shard="heads", group=group),
        [shard(heads, 2), gamma_qk],
        shard(g_heads, 2),
    )
    done["token_logprobs"] = _with_grads(
        lambda z: token_logprobs(z, IDS, group, vocab_leaves=8), [shard(logits, 2)], g_token
    )
    packed = pack_weight(shard(w_many, 1), k_block=64)
    done["hand_off"] = [hand_off(shard(many, 1), packed, group)]
    done["hand_off/scatter"] = [hand_off(shard(many, 1), packed, group, scatter=True)]
    done["hand_off/one_row"] = [hand_off(shard(many[:1], 1), packed, group)]
    uneven = x.reshape(-1).tensor_split([100 + 31 * r for r in range(size - 1)])[rank]
    done["grad_norm"] = [exact_sq_sum([uneven], group)]
    return done


def _rank(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    results = {str(dtype): _run(dtype, rank, size, dist.group.WORLD) for dtype in DTYPES}
    refused = ""
    try:
        row_linear(
            torch.zeros(3, 1, 64),
            torch.zeros(32, 64),
            k_block=64,
            group=dist.group.WORLD,
            sequence_parallel=True,
        )
    except DomainError as error:
        refused = str(error)
    torch.save((results, refused), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """Results by number of ranks, then by rank; one launch a size."""
    found: dict[int, list[Any]] = {}
    for size in SIZES:
        folder = tmp_path_factory.mktemp(f"ranks{size}")
        start_processes(_rank, (size, str(folder)), nprocs=size, start_method="fork")
        found[size] = [torch.load(Path(folder) / f"{r}.pt") for r in range(size)]
    return found


@pytest.fixture(scope="module")
def one() -> dict[str, dict[str, list[torch.Tensor]]]:
    return {str(dtype): _run(dtype, 0, 1, None) for dtype in DTYPES}


@pytest.fixture
def case(request: pytest.FixtureRequest, layouts: dict[int, list[Any]], one: dict[str, Results]) -> Case:
    """(results of one rank, results by rank) for a size and a dtype."""
    size, dtype = request.param
    return one[str(dtype)], [r[0][str(dtype)] for r in layouts[size]]


every_layout = pytest.mark.parametrize(
    "case", [(s, d) for s in SIZES for d in DTYPES], indirect=True, ids=lambda c: f"{c[0]}-{str(c[1])[6:]}"
)


def _merge_gate_up(parts: Sequence[Tensor], dim: int) -> Tensor:
    halves = [p.chunk(2, dim) for p in parts]
    return torch.cat([h[0] for h in halves] + [h[1] for h in halves], dim)


@every_layout
@pytest.mark.parametrize("tag", ["", "/sp"])
def test_column_linear_has_the_bits_of_one_rank(differing: Differing, case: Case, tag: str) -> None:
    whole, ranks = case
    for name, join in (("fc1", _merge_gate_up), ("head", torch.cat)):
        y, dx, dw = zip(*(r[name + tag] for r in ranks), strict=True)
        assert differing(join(y, 2), whole[name][0]) == 0
        for got in [torch.cat(dx)] if tag else dx:
            assert differing(got, whole[name][1]) == 0
        assert differing(join(dw, 0), whole[name][2]) == 0


@every_layout
@pytest.mark.parametrize("tag", ["", "/sp"])
def test_row_linear_has_the_bits_of_one_rank(differing: Differing, case: Case, tag: str) -> None:
    whole, ranks = case
    y, dx, dw = zip(*(r["fc2" + tag] for r in ranks), strict=True)
    for got in [torch.cat(y)] if tag else y:
        assert differing(got, whole["fc2"][0]) == 0
    assert differing(torch.cat(dx, 2), whole["fc2"][1]) == 0
    assert differing(torch.cat(dw, 1), whole["fc2"][2]) == 0


@every_layout
@pytest.mark.parametrize("tag", ["", "/sp"])
def test_the_embedding_has_the_bits_of_one_rank(differing: Differing, case: Case, tag: str) -> None:
    whole, ranks = case
    y, dw = zip(*(r["embedding" + tag] for r in ranks), strict=True)
    for got in [torch.cat(y)] if tag else y:
        assert differing(got, whole["embedding"][0]) == 0
    assert differing(torch.cat(dw), whole["embedding"][1]) == 0


@every_layout
@pytest.mark.parametrize(("name", "dim"), [("norm/sp", 0), ("qk_norm", 2)])
def test_a_scale_gradient_is_whole_on_the_first_rank_and_zero_on_the_others(
    differing: Differing, case: Case, name: str, dim: int
) -> None:
    whole, ranks = case
    y, dx, dw = zip(*(r[name] for r in ranks), strict=True)
    assert differing(torch.cat(y, dim), whole[name][0]) == 0
    assert differing(torch.cat(dx, dim), whole[name][1]) == 0
    assert differing(dw[0], whole[name][2]) == 0
    assert all(bool((d == 0).all()) for d in dw[1:])


@every_layout
def test_token_logprobs_have_the_bits_of_one_rank(differing: Differing, case: Case) -> None:
    whole, ranks = case
    y, dz = zip(*(r["token_logprobs"] for r in ranks), strict=True)
    for got in y:
        assert differing(got, whole["token_logprobs"][0]) == 0
    assert differing(torch.cat(dz, 2), whole["token_logprobs"][1]) == 0


@every_layout
def test_many_rows_handed_on_in_pieces_have_the_bits_of_one_rank(differing: Differing, case: Case) -> None:
    whole, ranks = case
    for r in ranks:
        assert differing(r["hand_off"][0], whole["hand_off"][0]) == 0
        assert differing(r["hand_off/one_row"][0], whole["hand_off/one_row"][0]) == 0
        assert differing(r["grad_norm"][0], whole["grad_norm"][0]) == 0
    assert differing(torch.cat([r["hand_off/scatter"][0] for r in ranks]), whole["hand_off"][0]) == 0


def test_an_all_reduce_of_rank_sums_would_not_have_these_bits(differing: Differing) -> None:
    x, w = fill(60, FFN, salt=5), fill(HIDDEN, FFN, salt=4)
    whole = chain(x, pack_weight(w, k_block=64))
    halves = [chain(a, pack_weight(b, k_block=64)) for a, b in zip(x.chunk(2, 1), w.chunk(2, 1), strict=True)]
    assert differing(halves[0] + halves[1], whole) > 100


@pytest.mark.parametrize("size", SIZES)
def test_rows_that_ranks_cannot_share_are_refused_before_anything_is_sent(
    layouts: dict[int, list[Any]], size: int
) -> None:
    for _, refused in layouts[size]:
        assert f"scattered over {size} ranks" in refused
