# SPDX-License-Identifier: Apache-2.0
"""Scenarios of a model with experts."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_common import (  # type: ignore[import-not-found]
    arguments,
    attribute,
    bits,
    census,
    in_child,
    prefix_hits,
    prompts,
    reports,
    sample,
    start,
    stop,
    tokens,
    worker_of,
)
from engine_tampers import around, child, hooked, kind, of_class  # type: ignore[import-not-found]

SEQUENCES = 16


def moe(
    contract: str, first: str, second: str, dtype: str, tp: int = 1, whole_experts: bool = False
) -> dict[str, Any]:
    """A model with experts: its ways to a logprob and a weight sync; on one rank, what is planted and exchanged in it too."""
    degrees = {"tensor_parallel_size": tp, "enable_expert_parallel": whole_experts}
    asked = prompts()[:SEQUENCES]
    llm, rollout = start(contract, first, dtype, **degrees)
    got, _ = sample(llm, rollout, asked)
    found: dict[str, Any] = {
        "prompts": [list(s.prompt) for s in got],
        "tokens": tokens(got),
        "decode": bits(got),
    }
    found["prefill"] = bits(rollout.rescore(got, step=0))
    found["reports"] = reports(rollout)
    found["weights"] = rollout.weights(step=0)
    if tp == 1 and dtype == "bfloat16":
        found["census"] = census(llm)
        found["planted"] = planted(llm)
        found["calls"] = llm.collective_rpc("isoexec_report", timeout=60)[0]["calls"]
        found["exchanged"] = exchanged(llm, rollout)
        found["left_alone"] = reports(rollout)[0]["problems"]
    found["synced_weights"] = rollout.sync(Path(second) / "model.safetensors", 1, step=1)
    found["synced"] = bits(sample(llm, rollout, asked)[0])
    if tp == 1 and dtype == "bfloat16":
        found["unseen_write"] = unseen_write(llm, rollout)
    elif tp > 1:
        llm.collective_rpc(swap_experts_of_rank_one, timeout=60)
        found["swapped"] = reports(rollout)
    stop(llm)
    if tp == 1:
        llm, rollout = start(contract, second, dtype, max_num_seqs=1)
        found["alone"] = bits(sample(llm, rollout, asked[:3])[0])
        stop(llm)
        chunks = {"enable_chunked_prefill": True, "max_num_seqs": 16, "max_num_batched_tokens": 48}
        llm, rollout = start(contract, first, dtype, enable_prefix_caching=True, block_size=32, **chunks)
        found["chunked"] = bits(rollout.rescore(got, step=0))
        found |= prefix_hits(llm, rollout, prompts(head=96)[:2])
        stop(llm)
    return found


def _layer(llm: Any) -> Any:
    return worker_of(llm).get_model().model.layers[1].mlp


def planted(llm: Any) -> dict[str, Any]:
    """The census with each of several things planted in a layer of experts."""
    import torch
    from vllm.model_executor.layers.activation import SiluAndMul

    layer = _layer(llm)
    experts = layer.experts.routed_experts

    def alone(x: Any, _w: Any, _offsets: Any) -> Any:
        return torch.zeros(x.shape[0], 2 * experts.w2_weight.shape[2], dtype=x.dtype) + x[:, :1]

    plants = {
        "a scaled combine": attribute(
            experts.combine, "forward", around(experts.combine.forward, lambda x: x * 1.0000001)
        ),
        "a cast of the logits": attribute(
            layer.gate, "forward", around(layer.gate.forward, lambda x: x.bfloat16().float())
        ),
        "a native activation": attribute(experts.act_fn, "_forward_method", SiluAndMul.forward_native),
        "other products": attribute(experts.gate_up, "forward", alone),
        "the engine's choice": attribute(
            layer.experts.router, "_compute_routing", native_routing(layer.experts.router)
        ),
    }
    found = {}
    for name, plant in plants.items():
        with plant:
            found[name] = census(llm)
    return found


def native_routing(router: Any) -> Callable[..., Any]:
    """The choice of the engine's own router, with the types of ours."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    def choose(*args: Any, **options: Any) -> Any:
        weights, experts = CPURouter._compute_routing(router, *args, **options)
        return weights, experts.long()

    return choose


def exchanged(llm: Any, rollout: Any) -> dict[str, Any]:
    """What the report says while each of several things is exchanged behind the adapter's back."""
    import torch
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from isoexec.adapters.vllm import moe as ours
    from isoexec.kernels.combine import combine

    layer = _layer(llm)
    runner, experts = layer.experts, layer.experts.routed_experts
    native = CPURouter(top_k=3, global_num_experts=16)
    swapped = object.__new__(UnquantizedFusedMoEMethod)
    torch.nn.Module.__init__(swapped)
    swapped.moe_kernel = None

    def turned(_module: Any, _args: Any, out: Any) -> Any:
        return (out[0].flip(0), out[1]) if out[0].shape[0] > 300 else None

    tampers = {
        "a kernel rebound where it is used": of_class(ours, "combine", lambda y, w: y[:: w.shape[1]]),
        "a method of the class": of_class(ours.ExpertDispatch, "back", lambda _self, rows, _plan: rows),
        "the engine's choice": attribute(runner.router, "_compute_routing", native_routing(runner.router)),
        "the engine's own router": attribute(runner, "router", native),
        "one expert fewer a token": attribute(runner.router, "top_k", 2),
        "the engine's own runner": kind(runner, MoERunner),
        "the engine's own experts": attribute(experts, "quant_method", swapped),
        "the engine's own gate": attribute(layer.gate, "quant_method", UnquantizedLinearMethod()),
        "a hook that waits": hooked(experts.dispatch, turned),
        "other experts than the rank's": attribute(experts.dispatch, "first", 1),
        "the block of one product": attribute(experts.down.isoexec_packed, "k_block", 32),
        "the products of one layer": attribute(experts.gate_up, "forward", lambda x, w, _offsets: x @ w[0].T),
        "the order of the sum": attribute(
            experts.combine,
            "forward",
            lambda y, weights: combine(
                y.view(*weights.shape, -1).flip(1).reshape(y.shape), weights.flip(1).contiguous()
            ),
        ),
        "the activation": child(experts, "act_fn", torch.nn.SiLU()),
    }
    found: dict[str, Any] = {}
    for name, tamper in tampers.items():
        with tamper:
            (report,) = rollout.attest("periodic", step=1, require=False)
        found[name] = {
            "process": report.changed or "",
            "regions": {r.region: r.problem or "" for r in report.regions if not r.ok},
        }
    return found


def unseen_write(llm: Any, rollout: Any) -> list[list[str]]:
    """What the report says after writes that no loader and no version counter sees: to an expert, and to the router."""
    layer = _layer(llm)
    found = []
    for weight in (layer.experts.routed_experts.w2_weight, layer.gate.weight):
        kept = weight.data.flatten()[0].item()
        weight.data.view(-1)[0] += 1
        found.append(reports(rollout)[0]["problems"])
        weight.data.view(-1)[0] = kept
    return found


def swap_experts_of_rank_one(worker: Any) -> None:
    """In a worker: rank 1 loses the contract's combine in one layer, while rank 0 keeps it."""
    import torch

    if worker.rank == 1:
        worker.get_model().model.layers[1].mlp.experts.routed_experts.combine.__class__ = torch.nn.Identity


def native_moe(first: str, second: str, dtype: str) -> dict[str, Any]:
    """The engine as it is: what it samples, scores, and lets nobody read."""
    llm, rollout = start(None, first, dtype)
    got, _ = sample(llm, rollout, prompts()[:SEQUENCES])
    parts = llm.collective_rpc("isoexec_weight_partials", timeout=60)[0]
    found = {
        "prompts": [list(s.prompt) for s in got],
        "tokens": tokens(got),
        "decode": bits(got),
        "reports": reports(rollout),
        "unknown": parts["unknown"],
    }
    found["census"] = census(llm)
    del second
    stop(llm)
    return found


def refusals(contract: str, dense_contract: str, first: str, dense: str) -> dict[str, str]:
    """Ways to come to a model with experts that is not under its contract; each must end in a refusal."""
    from vllm import LLM

    from isoexec.adapters.vllm.adapter import engine_args
    from isoexec.adapters.vllm.rollout import Rollout

    def build(before: Callable[[], None] | None, contract: str, model: str, **more: Any) -> str:
        asked = engine_args(contract, **arguments(model, "bfloat16", **more))
        if before is not None:
            before()
        Rollout(LLM(**asked))
        return "sampled"

    def no_runner() -> None:
        from vllm.model_executor.custom_op import op_registry_oot
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        del op_registry_oot["MoERunner"]

    def a_part() -> None:
        os.environ["ISOEXEC_ENFORCE"] = "combine=off"

    def natively() -> None:
        os.environ["ISOEXEC_ENFORCE"] = "dispatch=observe,expert_linear=observe,combine=observe,silu_mul=off"

    cases: dict[str, Callable[[], str]] = {
        "no_runner": functools.partial(build, no_runner, contract, first),
        "a_part": functools.partial(build, a_part, contract, first),
        "experts_under_dense": functools.partial(build, None, dense_contract, first),
        "dense_under_experts": functools.partial(build, None, contract, dense),
        "biased_choice": functools.partial(
            build, None, contract, first, hf_overrides={"norm_topk_prob": False}
        ),
        "eight_experts": functools.partial(build, None, contract, first, hf_overrides={"num_experts": 8}),
        "three_ranks": functools.partial(build, None, contract, first, tensor_parallel_size=3),
        "experts_natively": functools.partial(build, natively, contract, first),
    }
    return {name: in_child(case) for name, case in cases.items()}
