# SPDX-License-Identifier: Apache-2.0
"""The sm90 linear and its gradients for `kernels.py`, next to cuBLAS as shipped, vLLM's kernel and a tree of eight leaves."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from leaf_tree import LEAVES, leaf_tree  # type: ignore[import-not-found]  # beside this script
from subjects import BF16, TRAINED, Model, Subject, rand, vllm  # type: ignore[import-not-found]
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from isoexec.kernels.linear.hopper import table
from isoexec.kernels.linear.hopper.ops import input_gradient, linear, row_linear, weight_gradient

__all__ = ["FUNCTIONS", "subjects"]

FUNCTIONS = ("linear.mma_chain/1",)
ROW_PARALLEL = ("o", "down", "out", "shared_down")  # weights whose K ranks share elsewhere


def _pair(left: tuple[int, int], right: tuple[int, int], scale: float) -> tuple[Tensor, Tensor]:
    return rand(*left), rand(*right, scale=scale)


def _wide(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).float()


def _persistent(x: Tensor, w: Tensor) -> Any:
    return vllm("matmul_persistent")(x, w.t())


def _persistent_input(dy: Tensor, w: Tensor) -> Any:
    return vllm("matmul_persistent")(dy, w)


def _leaves(x: Tensor, w: Tensor) -> Tensor:
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
    made: Tensor = leaf_tree(x, w, programs=programs)
    return made


def _provider(product: Any, N: int, K: int, M: int) -> str:
    tile = table.tile_for(N, K, M) if product == "forward" else table.chain_tile(product, N, K, M)
    return "cublaslt" if tile is None else f"{'few_rows' if product == 'forward' else 'chain'} {tile.kind}"


def subjects(model: Model, M: int) -> Iterator[Subject]:
    """Every linear of a model at M rows; its gradients where M is of training."""
    for name, (N, K) in model.weights.items():
        flops, moved = 2.0 * M * N * K, 2.0 * (N * K + M * K)
        peers = {"vllm": _persistent} | ({"leaf tree": _leaves} if K % (LEAVES * 64) == 0 else {})
        common: dict[str, Any] = {
            "shape": f"{model.name} {name} {N}x{K}",
            "rows": M,
            "function": FUNCTIONS[0],
            "flops": flops,
            "most": 4 if M >= 8192 else 64,
        }
        forward: dict[str, Any] = common | {
            "make": partial(_pair, (M, K), (N, K), K**-0.5),
            "provider": _provider("forward", N, K, M),
        }
        yield Subject(
            op="linear", nbytes=moved + 2 * M * N, native=F.linear, ours=linear, peers=peers, **forward
        )
        if name == "lm_head":
            yield Subject(
                op="linear_fp32",
                nbytes=moved + 4 * M * N,
                native=_wide,
                ours=partial(linear, fp32_out=True),
                **forward,
            )
        if name in ROW_PARALLEL:
            yield Subject(
                op="row_linear",
                nbytes=moved + 2 * M * N,
                native=F.linear,
                ours=row_linear,
                peers=peers,
                **forward,
            )
        if M < TRAINED:
            continue
        yield Subject(
            op="linear_input_gradient",
            nbytes=moved + 2 * M * N,
            make=partial(_pair, (M, N), (N, K), K**-0.5),
            native=torch.mm,
            ours=input_gradient,
            peers={"vllm": _persistent_input},
            provider=_provider("input", N, K, M),
            **common,
        )
        yield Subject(
            op="linear_weight_gradient",
            nbytes=moved + 2 * M * N,
            make=partial(_pair, (M, N), (M, K), 1.0),
            native=lambda dy, x: torch.mm(dy.t(), x),
            ours=partial(weight_gradient, out_dtype=BF16),
            peers={"vllm": lambda dy, x: vllm("matmul_persistent")(dy.t(), x)},
            provider=_provider("weight", N, K, M),
            **common,
        )
