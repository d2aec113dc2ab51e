# SPDX-License-Identifier: Apache-2.0
"""Which part of which checkpoint tensor each live parameter of a rank holds, by its Hugging Face name.

vLLM joins q, k and v, and gate and up, and pads the vocabulary; here they are taken apart again, so that the trainer's tensors
and the engine's can be compared by name whatever their layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from isoexec.probes.weights import Block, weight_partials

__all__ = ["Shard", "partials", "shards"]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A block of a checkpoint tensor; ``tensor`` is None where the engine holds it in a form nobody can read."""

    name: str
    tensor: Tensor | None
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


def _block(name: str, tensor: Tensor, whole: tuple[int, ...], at: tuple[int, ...]) -> Shard:
    return Shard(name=name, tensor=tensor, global_shape=whole, offsets=at)


def _packed_names(model: nn.Module, path: str) -> list[str]:
    """The checkpoint's names of the parts of a joined linear, in order."""
    parent, _, leaf = path.rpartition(".")
    parts = getattr(model, "packed_modules_mapping", {}).get(leaf, [])
    return [f"{parent}.{part}" for part in parts]


def _qkv(names: list[str], kind: str, param: Tensor, layer: Any) -> Iterator[Shard]:
    size, rank = layer.head_size, layer.tp_rank
    replica = rank % layer.num_kv_head_replicas
    kv_rank = rank // layer.num_kv_head_replicas
    start = 0
    for part, (name, heads, total, width) in enumerate(
        (
            (names[0], layer.num_heads, layer.total_num_heads, size),
            (names[1], layer.num_kv_heads, layer.total_num_kv_heads, size),
            (names[2], layer.num_kv_heads, layer.total_num_kv_heads, layer.v_head_size),
        )
    ):
        rows = heads * width
        block = param[start : start + rows]
        start += rows
        if part > 0 and replica:  # the same heads are on another rank, which counts them
            continue
        at = (rank if part == 0 else kv_rank) * rows
        tail = tuple(param.shape[1:])
        yield _block(f"{name}.{kind}", block, (total * width, *tail), (at, *(0 for _ in tail)))


def _merged(names: list[str], kind: str, param: Tensor, layer: Any) -> Iterator[Shard]:
    start = 0
    tail = tuple(param.shape[1:])
    for name, whole in zip(names, layer.output_sizes, strict=True):
        rows = whole // layer.tp_size
        block = param[start : start + rows]
        start += rows
        yield _block(f"{name}.{kind}", block, (whole, *tail), (layer.tp_rank * rows, *(0 for _ in tail)))


def _experts(path: str, kind: str, param: Tensor, layer: Any) -> Iterator[Shard]:
    """The weights of a rank's experts, one a checkpoint tensor; the engine's own method packs them for its kernel."""
    at = path.rpartition(".")[0]
    parts = ("gate_proj", "up_proj") if kind == "w13_weight" else ("down_proj",)
    readable = hasattr(layer.quant_method, "steps") and kind in ("w13_weight", "w2_weight")
    moe = layer.moe_config.moe_parallel_config
    for index, expert in enumerate(layer.expert_map_manager.get_local_expert_ids()):
        names = [f"{at}.{expert}.{part}.weight" for part in parts]
        if not readable:
            for name in names:
                yield Shard(name=name, tensor=None, global_shape=(), offsets=())
            continue
        for name, block in zip(names, param[index].chunk(len(parts)), strict=True):
            rows, width = block.shape
            if len(parts) == 2:
                yield _block(name, block, (rows * moe.tp_size, width), (rows * moe.tp_rank, 0))
            else:
                yield _block(name, block, (rows, width * moe.tp_size), (0, width * moe.tp_rank))


def _of_layer(
    model: nn.Module, path: str, layer: Any, kind: str, param: Tensor, first: bool
) -> Iterator[Shard]:
    tail = tuple(param.shape[1:])
    zeros = tuple(0 for _ in tail)
    joined = isinstance(layer, QKVParallelLinear | MergedColumnParallelLinear)
    if isinstance(layer, LinearBase) and param.dtype != layer.params_dtype:
        loaded = param.to(layer.params_dtype)  # the native engine widens a bias when it packs the weight
        param = loaded if torch.equal(loaded.to(param.dtype), param) else param
    names = _packed_names(model, path) if joined else [path]
    if isinstance(layer, RoutedExperts):
        yield from _experts(path, kind, param, layer)
    elif param.numel() == 0 or (joined and len(names) < 2):
        for name in names or [path]:
            yield Shard(name=f"{name}.{kind}", tensor=None, global_shape=(), offsets=())
    elif isinstance(layer, QKVParallelLinear):
        yield from _qkv(names, kind, param, layer)
    elif isinstance(layer, MergedColumnParallelLinear):
        yield from _merged(names, kind, param, layer)
    elif isinstance(layer, ColumnParallelLinear):
        yield _block(
            f"{path}.{kind}", param, (layer.output_size, *tail), (layer.tp_rank * param.shape[0], *zeros)
        )
    elif isinstance(layer, RowParallelLinear) and param.dim() == 2:
        rows = param.shape[0]
        yield _block(f"{path}.{kind}", param, (rows, layer.input_size), (0, layer.tp_rank * param.shape[1]))
    elif isinstance(layer, VocabParallelEmbedding):
        at = layer.shard_indices.org_vocab_start_index
        rows = layer.shard_indices.org_vocab_end_index - at
        if rows:  # a rank may hold padding only
            yield _block(f"{path}.{kind}", param[:rows], (layer.org_vocab_size, *tail), (at, *zeros))
    elif first:  # replicated: one rank counts it
        yield _block(f"{path}.{kind}", param, tuple(param.shape), tuple(0 for _ in param.shape))


def shards(model: nn.Module) -> Iterator[Shard]:
    """The blocks of checkpoint tensors this rank holds; over the ranks of a model each element comes once."""
    first = get_tp_group().rank_in_group == 0
    seen: set[int] = set()
    for path, layer in model.named_modules():
        for kind, param in layer.named_parameters(recurse=False):
            if id(param) in seen:  # tied
                continue
            seen.add(id(param))
            yield from _of_layer(model, path, layer, kind, param.data, first)


def partials(model: nn.Module) -> dict[str, Any]:
    """Partial digests of this rank: ``tensors`` {name: [lo, hi]}, ``numel``, ``total``, and ``zero`` and ``unknown`` names."""
    unknown: list[str] = []

    def readable() -> Iterator[tuple[str, Block]]:
        for shard in shards(model):
            if shard.tensor is None:
                unknown.append(shard.name)
            else:
                yield shard.name, Block(shard.tensor, shard.global_shape, shard.offsets)

    found = weight_partials(readable())
    lanes = {name: list(pair) for name, pair in found.tensors.items()}
    return {**found._asdict(), "tensors": lanes, "unknown": unknown}
