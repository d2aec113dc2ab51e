# SPDX-License-Identifier: Apache-2.0
"""Moves weights between a GPTModel's shards and Hugging Face names: load, export, save, and digests without a gather.

One table says which part of which parameter is which block of which named tensor; loading, exporting and digesting all read it.
Megatron fuses query, key and value per query group, and a rank's gate rows with its up rows.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from isoexec.contracts.errors import IsoExecError
from isoexec.probes import weights
from isoexec.probes.weights import Block, WeightPartials

__all__ = [
    "Piece",
    "WeightError",
    "export_hf",
    "load_hf",
    "pieces",
    "save_hf",
    "unwrap",
    "weight_partials",
]

_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
_HEAD_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
_OF_EXPERT = ".mlp.experts."
_DRAFTS = "model.mtp_layers."  # of MiMo: no part of a logprob


class WeightError(IsoExecError):
    """A checkpoint and a model that do not fit: a name or shape one of them lacks."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """``view`` (of a parameter, any strides) is the block of ``name`` that has ``shape`` and starts at ``offset``.

    ``owner`` is False on the ranks that hold a copy of a block another rank answers for.
    """

    name: str
    view: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    whole: tuple[int, ...]
    owner: bool = True

    def read(self) -> Tensor:
        return self.view.detach().reshape(self.shape)

    def write(self, block: Tensor) -> None:
        self.view.copy_(block.reshape(self.view.shape))

    def cut(self, tensor: Tensor) -> Tensor:
        """Cut this piece's block out of the whole tensor."""
        if tuple(tensor.shape) != self.whole:
            raise WeightError(f"{self.name}: wanted shape {self.whole}, found {tuple(tensor.shape)}")
        return tensor[tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))]


def unwrap(model: Any) -> Any:
    """The GPTModel inside DDP and Float16Module wrappers."""
    while not hasattr(model, "decoder"):
        model = model.module
    return model


def pieces(model: Any, *, masters: bool = False) -> Iterator[Piece]:
    """Every block this rank holds, in the model's parameter order.

    ``masters`` reads the optimizer's fp32 master weights in the place of bf16 parameters.  Of data-parallel replicas the first
    answers for a block; an expert's replicas are the ranks of expert data parallelism.  Raises WeightError for masters that
    replicas hold in shards.
    """
    model = unwrap(model)
    groups = model.pg_collection
    if masters and groups.dp.size() > 1:
        _refuse_shards(model)
    for piece in _blocks(model, masters=masters):
        group = groups.expt_dp if _OF_EXPERT in piece.name else groups.dp
        yield replace(piece, owner=False) if group.rank() else piece


def _refuse_shards(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if getattr(parameter, "main_param_sharded", False):
            raise WeightError(
                f"{name}: wanted whole fp32 master weights on each replica, found the distributed optimizer's shards over DP "
                f"{model.pg_collection.dp.size()}; read the weights (masters=False), or train without distributed_optimizer"
            )


def _blocks(model: Any, *, masters: bool) -> Iterator[Piece]:
    config, groups = model.config, model.pg_collection
    t, r = groups.tp.size(), groups.tp.rank()
    first = get_transformer_layer_offset(config, None, model.pg_collection.pp.rank())
    tied = model.share_embeddings_and_output_weights
    for name, parameter in model.named_parameters():
        data = getattr(parameter, "main_param", parameter) if masters else parameter
        data = data.detach().view(parameter.shape)
        if name == "embedding.word_embeddings.weight":
            yield _rows("model.embed_tokens.weight", data, t, r)
        elif name == "output_layer.weight":
            # the last stage's copy of a tied weight belongs to the embedding's first stage
            yield _rows("model.embed_tokens.weight" if tied else "lm_head.weight", data, t, r, owner=not tied)
        elif name == "decoder.final_layernorm.weight":
            yield _copy("model.norm.weight", data, r)
        else:
            found = _LAYER.fullmatch(name)
            if found is None:
                raise WeightError(f"{name}: no Hugging Face name is known for this parameter")
            at = f"model.layers.{int(found[1]) + first}."
            expert = _EXPERT.fullmatch(found[2])
            if expert is not None:
                yield from _expert(at, int(expert[1]), expert[2], data, config, groups)
            else:
                yield from _layer(at, found[2], data, config, t, r)


def _expert(at: str, index: int, rest: str, data: Tensor, config: Any, groups: Any) -> Iterator[Piece]:
    held = config.num_moe_experts // groups.ep.size()
    t, r = groups.expt_tp.size(), groups.expt_tp.rank()
    at += f"mlp.experts.{groups.ep.rank() * held + index}."
    if rest == "linear_fc1":
        for key, half in zip(("gate", "up"), data.chunk(2, 0), strict=True):
            yield _rows(f"{at}{key}_proj.weight", half, t, r)
    else:
        yield _block(f"{at}down_proj.weight", data, tuple(data.shape), t, r, 1)


def _layer(at: str, rest: str, data: Tensor, config: Any, t: int, r: int) -> Iterator[Piece]:
    if rest in _NORMS:
        yield _copy(at + _NORMS[rest], data, r)
    elif rest in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
        width, groups = config.kv_channels, config.num_query_groups // t
        per = config.num_attention_heads // config.num_query_groups
        fused = data.view(groups, (per + 2) * width, *data.shape[1:])
        for key, start, heads in (("q", 0, per), ("k", per, 1), ("v", per + 1, 1)):
            yield _block(
                at + f"self_attn.{key}_proj.{rest.rpartition('.')[2]}",
                fused[:, start * width : (start + heads) * width],
                (groups * heads * width, *data.shape[1:]),
                t,
                r,
                0,
            )
    elif rest == "mlp.router.weight":
        yield _copy(f"{at}mlp.gate.weight", data, r)
    elif rest == "mlp.linear_fc1.weight":
        for key, half in zip(("gate", "up"), data.chunk(2, 0), strict=True):
            yield _rows(at + f"mlp.{key}_proj.weight", half, t, r)
    elif rest in ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight"):
        key = "self_attn.o_proj" if rest.startswith("self_attention") else "mlp.down_proj"
        yield _block(at + f"{key}.weight", data, tuple(data.shape), t, r, 1)
    else:
        raise WeightError(f"{at}{rest}: no Hugging Face name is known for this parameter")


def _block(
    name: str, view: Tensor, shape: tuple[int, ...], t: int, r: int, dim: int, owner: bool = True
) -> Piece:
    offset = tuple(r * n if i == dim else 0 for i, n in enumerate(shape))
    whole = tuple(t * n if i == dim else n for i, n in enumerate(shape))
    return Piece(name=name, view=view, shape=shape, offset=offset, whole=whole, owner=owner)


def _rows(name: str, data: Tensor, t: int, r: int, owner: bool = True) -> Piece:
    return _block(name, data, tuple(data.shape), t, r, 0, owner)


def _copy(name: str, data: Tensor, r: int) -> Piece:
    return _block(name, data, tuple(data.shape), 1, 0, 0, owner=r == 0)


def load_hf(model: Any, folder: Path | str) -> None:
    """Copy every tensor of a Hugging Face folder into this rank's shards, in the model's dtype.

    Raises WeightError for a tensor the checkpoint lacks or has too many, and for a shape that does not fit.  MiMo's layers for
    multi-token prediction are passed over, as the engine passes over them.
    """
    where: dict[str, Path] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            where |= dict.fromkeys(handle.keys(), file)
    inner = unwrap(model)
    with torch.no_grad():
        for piece in pieces(inner):
            if piece.name not in where:
                raise WeightError(f"{piece.name}: not in {folder} (it has {len(where)} tensors)")
            with safe_open(where[piece.name], framework="pt") as handle:
                piece.write(piece.cut(handle.get_tensor(piece.name)))
    unknown = sorted(n for n in set(where) - _known_names(inner) if not n.startswith(_DRAFTS))
    if unknown:
        raise WeightError(f"{folder} holds tensors this model has no place for: {', '.join(unknown[:5])}")


def _known_names(model: Any) -> set[str]:
    names = {"model.embed_tokens.weight", "model.norm.weight"}
    if not model.share_embeddings_and_output_weights:
        names.add("lm_head.weight")
    config = model.config
    per_layer = [
        *(n for n in _NORMS.values() if config.qk_layernorm or n not in _HEAD_NORMS),
        *(f"self_attn.{k}_proj.bias" for k in "qkv" if config.add_qkv_bias),
        *(f"self_attn.{k}_proj.weight" for k in "qkvo"),
        *_mlp_names(config.num_moe_experts),
    ]
    return names | {f"model.layers.{i}.{n}" for i in range(config.num_layers) for n in per_layer}


def _mlp_names(experts: int | None) -> list[str]:
    at = ["mlp."] if experts is None else [f"mlp.experts.{index}." for index in range(experts)]
    names = [f"{one}{k}_proj.weight" for one in at for k in ("gate", "up", "down")]
    return names if experts is None else ["mlp.gate.weight", *names]


def export_hf(model: Any, *, masters: bool = False, device: torch.device | None = None) -> dict[str, Tensor]:
    """The whole model by Hugging Face name on rank 0 of the world, in the weights' own dtype; empty on every other rank.

    Every rank must call it.  Blocks travel point to point; a replica sends nothing.  The tensors are on ``device``, the CPU
    where none is named; on the model's own device a tensor that this rank holds alone and whole is the parameter itself.
    """
    inner = unwrap(model)
    mine = [p for p in pieces(inner, masters=masters) if p.owner]
    if device is not None and dist.get_world_size() == 1 and all(p.view.device == device for p in mine):
        return {p.name: p.read() for p in mine}
    if dist.get_world_size() == 1:
        lists = [[(p.name, p.shape, p.offset, p.whole, p.view.dtype) for p in mine]]
    else:
        lists = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(lists, [(p.name, p.shape, p.offset, p.whole, p.view.dtype) for p in mine])
    rank = dist.get_rank()
    if rank != 0:
        for piece in mine:
            dist.send(piece.read().contiguous(), 0)
        return {}
    out: dict[str, Tensor] = {}
    for source, entries in enumerate(lists):
        for index, (name, shape, offset, whole, dtype) in enumerate(entries):
            if source == 0:
                block = mine[index].read()
            else:
                block = torch.empty(shape, dtype=dtype, device=next(inner.parameters()).device)
                dist.recv(block, source)
            target = out.get(name)
            if target is None:
                target = out[name] = torch.empty(whole, dtype=dtype, device=device)
            target[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))].copy_(block)
    return out


def save_hf(model: Any, folder: Path | str) -> Path:
    """Write ``model.safetensors`` (and the config.json the model was built from) to ``folder``; rank 0 writes, every rank calls.

    The file appears whole or not at all: it is written beside its place, flushed to disk and renamed.
    """
    target = Path(folder) / "model.safetensors"
    tensors = export_hf(model)
    if dist.get_rank() == 0:
        target.parent.mkdir(parents=True, exist_ok=True)
        source = getattr(unwrap(model), "hf_config_path", None)
        if source is not None and Path(source).resolve() != (target.parent / "config.json").resolve():
            shutil.copyfile(source, target.parent / "config.json")
        part = target.with_name(f".{target.name}.{os.getpid()}")
        save_file({n: t.contiguous() for n, t in tensors.items()}, part, {"format": "pt"})
        with part.open("rb") as handle:
            os.fsync(handle.fileno())
        part.replace(target)
    dist.barrier()
    return target


def weight_partials(model: Any, *, masters: bool = False) -> WeightPartials:
    """Digest what this rank holds, by Hugging Face name; ``masters`` as in `pieces`.

    Partials of all ranks add up mod 2**64 per lane to the digest of the whole tensor, so nothing is gathered.  Replicated
    blocks are answered for by the first tensor-parallel rank, and by the first data-parallel replica (`pieces`).
    """
    mine = (p for p in pieces(model, masters=masters) if p.owner)
    return weights.weight_partials((p.name, Block(p.read(), p.whole, p.offset)) for p in mine)
