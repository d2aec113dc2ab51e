# SPDX-License-Identifier: Apache-2.0
"""Two more scenes: bitwise equality over every layout and state path, and a hybrid model that is only watched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from isoexec.adapters.demo.job import Layout
from isoexec.adapters.demo.phases import Stage, outcome_of
from isoexec.adapters.demo.report import PhaseResult
from isoexec.adapters.demo.task import Task
from isoexec.contracts.errors import IsoExecError

__all__ = ["EXPERTS", "MATRIX", "hybrid_scene", "make_qwen3_next", "matrix_scene"]

_TOKENS = 20_000
_PLAIN = Task(prompts=8, group=8)
_LONG = replace(_PLAIN, prompt_lengths=(100, 131))

EXPERTS = ("TP1xTP2+SP+EP2", "TP2+EP2xTP1")
"""Cells of a model with experts; it has no pipeline of stages."""

# name -> layout, task, whether requests are seeded (a seeded request with a chunked prompt crashes this engine on CPU)
MATRIX: dict[str, tuple[Layout, Task, bool]] = {
    "TP1xTP1": (Layout(), _PLAIN, True),
    "TP1xTP2": (Layout(trainer_tp=2), _PLAIN, True),
    "TP2xTP1": (Layout(engine_tp=2), _PLAIN, True),
    "TP1xTP2+SP": (Layout(trainer_tp=2, sequence_parallel=True), _PLAIN, True),
    "TP1xPP2": (Layout(trainer_pp=2), _PLAIN, True),
    "TP1xTP2+SP+EP2": (Layout(trainer_tp=2, sequence_parallel=True, trainer_ep=2), _PLAIN, True),
    "TP2+EP2xTP1": (Layout(engine_tp=2, engine={"enable_expert_parallel": True}), _PLAIN, True),
    "chunked": (
        Layout(engine={"enable_chunked_prefill": True, "max_num_batched_tokens": 96}),
        _LONG,
        False,
    ),
    "prefix": (Layout(engine={"enable_prefix_caching": True, "block_size": 32}), _LONG, True),
    "batch-1": (Layout(engine={"max_num_seqs": 1}), _PLAIN, True),
    "batch-64": (Layout(engine={"max_num_seqs": 64}), _PLAIN, True),
}


def matrix_scene(
    stage: Stage, *, dtypes: Sequence[str], names: Sequence[str] = tuple(MATRIX), tokens: int = _TOKENS
) -> list[PhaseResult]:
    """Train under the contract in every layout until ``tokens`` tokens are sampled, each compared as integers by the daemon.

    Raises IsoExecError when one token differs, or when a state path that was to be tried was not taken.
    """
    results = []
    for dtype in dtypes:
        for name in names:
            layout, task, seeded = MATRIX[name]
            short = {"bfloat16": "bf16", "float32": "fp32"}[dtype]
            results.append(
                _cell(stage, f"{name}-{short}", replace(layout, dtype=dtype), task, seeded, tokens)
            )
    return results


def _cell(stage: Stage, name: str, layout: Layout, task: Task, seeded: bool, tokens: int) -> PhaseResult:
    result = PhaseResult(name=name, layout=str(layout))
    run = f"matrix-{name.replace('+', '-')}"
    steps = -(-tokens // (task.batch * task.response))
    with stage.job(run, layout, contract=stage.contract, regime="bitwise", task=task, seeded=seeded) as job:
        for step in range(steps):
            result.steps.append(job.step(step))
            stage.tick(name, step + 1, steps)
        result.windows = stage.wait_windows(run, steps)
        cached = job.cached_tokens
    result.verdict, result.cause = outcome_of(stage, run, stage.marker(run))
    m = result.mismatch
    if layout.engine.get("enable_prefix_caching"):
        result.lines.append(f"{cached} prompt tokens came from the prefix cache")
        if not cached:
            raise IsoExecError(f"{name}: no prompt token came from the prefix cache; nothing was tried")
    if m.tokens < tokens or m.bitwise_equal != m.tokens:
        raise IsoExecError(
            f"{name}: wanted at least {tokens} tokens, all bitwise equal; found {m.bitwise_equal} of {m.tokens} equal"
        )
    return result


def hybrid_scene(stage: Stage, *, steps: int = 3) -> PhaseResult:
    """Sample a Gated DeltaNet hybrid on the native engine and let it read its own samples back: decode against prefill."""
    model = make_qwen3_next(stage.work / "qwen3-next")
    result = PhaseResult(name="hybrid", layout="TP1, engine alone")
    run = "demo-hybrid"
    task = replace(_PLAIN, prompts=2)
    with stage.job(run, Layout(), contract=None, regime="bf16_dense", task=task, engine_model=model) as job:
        for step in range(steps):
            job.sample(step)
            stage.tick("hybrid", step + 1, steps)
        result.windows = stage.wait_windows(run, steps)
    result.verdict, result.cause = outcome_of(stage, run, stage.marker(run))
    pairs = [
        p
        for w in result.windows
        for p in w["pairs"]
        if list(p["pair"]) == ["engine_decode", "engine_prefill"]
    ]
    tokens = sum(p["tokens"] for p in pairs)
    equal = sum(p["bitwise_equal"] for p in pairs)
    mean = sum(float(p["mean_abs_d"]) * p["tokens"] for p in pairs) / max(tokens, 1)
    largest = max((float(p["max_abs_d"]) for p in pairs), default=0.0)
    result.lines.append(
        f"decode against the engine's own prefill: {equal} of {tokens} tokens bitwise equal, "
        f"mean |d| {mean:.4f}, max |d| {largest:.3f} nats"
    )
    return result


def make_qwen3_next(folder: Path) -> Path:
    """A tiny seeded Qwen3-Next checkpoint of three Gated DeltaNet layers, one attention layer and 8 experts."""
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, linear_key_head_dim=64, linear_value_head_dim=64,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_conv_kernel_dim=4, num_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64, norm_topk_prob=True,
        max_position_embeddings=512, rms_norm_eps=1e-6, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, attention_bias=False,
    )  # fmt: skip
    torch.manual_seed(1)
    model: Any = Qwen3NextForCausalLM(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in model.named_parameters():
            # wider than the default, which gives near-uniform logits that hide rounding
            if p.ndim >= 2 and "conv1d" not in name:
                gain = 1.0 if "embed" in name else (3.0 if "lm_head" in name else 1.0) / p.shape[-1] ** 0.5
                p.copy_(torch.randn(p.shape, generator=generator) * gain)
    model.save_pretrained(folder)
    return folder
