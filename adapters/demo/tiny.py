# SPDX-License-Identifier: Apache-2.0
"""Writes tiny, seeded Qwen3, Qwen3-MoE and MiMo checkpoints (config.json and safetensors) that both runtimes load.

Nothing is downloaded.

The initial weights are wider than Hugging Face's default: a standard deviation of 0.02 gives near-uniform
logits, and those hide rounding differences.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

WEIGHTS = "model.safetensors"

MIMO_CONFIG = '''"""The configuration of this checkpoint: Qwen2's, under the name of MiMo."""

from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"
'''
"""MiMo's configuration class comes with its checkpoints (``trust_remote_code``), for transformers has none."""


def qwen3_weights(
    *,
    seed: int,
    layers: int = 3,
    hidden: int = 128,
    ffn: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    vocab: int = 512,
    dtype: torch.dtype = torch.float32,
    mimo: bool = False,
    experts: int = 0,
) -> dict[str, torch.Tensor]:
    """Return the tensors of one model by Hugging Face name; the same seed always gives the same bytes.

    ``mimo`` gives query, key and value a bias and leaves the norms of their heads out.  With ``experts`` every layer has a
    router and that many experts of width ``ffn``.
    """
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * gain).to(dtype)

    def scale(size: int) -> torch.Tensor:
        return (1.0 + 0.1 * torch.randn(size, generator=generator)).to(dtype)

    weights = {"model.embed_tokens.weight": matrix(vocab, hidden, 1.0)}
    for index in range(layers):
        at = f"model.layers.{index}."
        weights[f"{at}input_layernorm.weight"] = scale(hidden)
        weights[f"{at}self_attn.q_proj.weight"] = matrix(heads * head_dim, hidden, hidden**-0.5)
        weights[f"{at}self_attn.k_proj.weight"] = matrix(kv_heads * head_dim, hidden, hidden**-0.5)
        weights[f"{at}self_attn.v_proj.weight"] = matrix(kv_heads * head_dim, hidden, hidden**-0.5)
        if mimo:
            for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
                weights[f"{at}self_attn.{part}_proj.bias"] = matrix(1, count * head_dim, 0.5).view(-1)
        else:
            weights[f"{at}self_attn.q_norm.weight"] = scale(head_dim)
            weights[f"{at}self_attn.k_norm.weight"] = scale(head_dim)
        o_width = heads * head_dim
        weights[f"{at}self_attn.o_proj.weight"] = matrix(hidden, o_width, o_width**-0.5)
        weights[f"{at}post_attention_layernorm.weight"] = scale(hidden)
        if experts:
            weights[f"{at}mlp.gate.weight"] = matrix(experts, hidden, hidden**-0.5)
        for mlp in (f"{at}mlp.experts.{e}" for e in range(experts)) if experts else (f"{at}mlp",):
            weights[f"{mlp}.gate_proj.weight"] = matrix(ffn, hidden, hidden**-0.5)
            weights[f"{mlp}.up_proj.weight"] = matrix(ffn, hidden, hidden**-0.5)
            weights[f"{mlp}.down_proj.weight"] = matrix(hidden, ffn, ffn**-0.5)
    weights["model.norm.weight"] = scale(hidden)
    weights["lm_head.weight"] = matrix(vocab, hidden, 3.0 * hidden**-0.5)
    return weights


def drawn(name: str, shape: Sequence[int], device: torch.device, *, tied: bool) -> torch.Tensor:
    """Random fp32 values of the tensor of a Hugging Face name, that keep activations near 1: the same each time on a device."""
    generator = torch.Generator(device=device).manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(tuple(shape), generator=generator, device=device)
    if name.endswith("norm.weight"):
        return 1.0 + 0.1 * values
    if name.endswith(".bias"):
        return 0.5 * values
    head = name.startswith("lm_head") or (tied and name.startswith("model.embed_tokens"))
    if name.startswith("model.embed_tokens") and not head:
        return values
    return values * ((3.0 if head else 1.0) * shape[-1] ** -0.5)


def save_weights(path: Path | str, weights: dict[str, torch.Tensor]) -> Path:
    """Write tensors under Hugging Face names to the safetensors file ``path`` and return it."""
    target = Path(path)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, target, {"format": "pt"})
    return target


def make_qwen3(
    path: Path | str,
    *,
    seed: int,
    layers: int = 3,
    hidden: int = 128,
    ffn: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    vocab: int = 512,
    max_positions: int = 2048,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a dense Qwen3 checkpoint without bias and with an untied head to folder ``path``; return it.

    The tokens 0, 1 and 2 are pad, begin and end. No tokenizer is written: prompts are token ids.
    """
    folder = _folder(path)
    sizes: dict[str, Any] = {
        "layers": layers,
        "hidden": hidden,
        "ffn": ffn,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab": vocab,
        "dtype": dtype,
    }
    save_weights(folder / WEIGHTS, qwen3_weights(seed=seed, **sizes))
    write_config(folder, max_positions=max_positions, **sizes)
    return folder


def _folder(path: Path | str) -> Path:
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_config(
    folder: Path,
    *,
    layers: int = 3,
    hidden: int = 128,
    ffn: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    vocab: int = 512,
    max_positions: int = 2048,
    theta: float = 10000.0,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    mimo: bool = False,
    drafts: bool = False,
) -> None:
    """Write the config.json of a dense Qwen3, or of a MiMo, of these sizes; MiMo's class of it comes beside it."""
    config: dict[str, object] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": ffn,
        "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": max_positions,
        "max_window_layers": layers,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocab,
    }
    if mimo:
        config |= {
            "architectures": ["MiMoForCausalLM"],
            "attention_bias": True,
            "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
            "model_type": "mimo",
            "num_nextn_predict_layers": int(drafts),
            "rms_norm_eps": 1e-05,
        }
        (folder / "configuration_mimo.py").write_text(MIMO_CONFIG)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def make_qwen3_moe(
    path: Path | str,
    *,
    seed: int,
    layers: int = 2,
    hidden: int = 128,
    ffn: int = 128,
    experts: int = 16,
    chosen: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    vocab: int = 512,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a Qwen3-MoE checkpoint to folder ``path``; return it.

    Every layer has ``experts`` experts of width ``ffn`` and no dense MLP; a token goes to ``chosen`` of them, whose
    weights are normed to a sum of one.
    """
    folder = _folder(path)
    sizes: dict[str, Any] = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab": vocab,
        "dtype": dtype,
    }
    weights = qwen3_weights(seed=seed, ffn=ffn, experts=experts, **sizes)
    save_weights(folder / WEIGHTS, weights)
    write_config(folder, ffn=2 * ffn, **sizes)
    config = json.loads((folder / "config.json").read_text()) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": ffn,
        "norm_topk_prob": True,
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return folder


def make_mimo(path: Path | str, *, seed: int, drafts: bool = True, hidden: int = 128, **sizes: Any) -> Path:
    """Write a dense MiMo checkpoint to folder ``path``; return it. ``sizes`` are `qwen3_weights`'s, and its defaults too.

    ``drafts`` adds a layer for multi-token prediction, as published checkpoints have one: no logprob depends on it.
    """
    folder = _folder(path)
    weights = qwen3_weights(seed=seed, mimo=True, hidden=hidden, **sizes)
    if drafts:
        at = "model.mtp_layers.0."
        weights |= {
            f"{at}{name.removeprefix('model.layers.0.')}": tensor.clone()
            for name, tensor in weights.items()
            if name.startswith("model.layers.0.")
        }
        weights[f"{at}input_proj.weight"] = torch.zeros(hidden, 2 * hidden)
    save_weights(folder / WEIGHTS, weights)
    write_config(folder, theta=640000.0, mimo=True, drafts=drafts, hidden=hidden, **sizes)
    return folder
