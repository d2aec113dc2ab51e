# SPDX-License-Identifier: Apache-2.0
"""Scenarios of a model with a bias on query, key and value."""

from __future__ import annotations

import functools
import os
from typing import Any

from engine_common import (  # type: ignore[import-not-found]
    arguments,
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
)


def mimo(contract: str, first: str, dtype: str, tp: int = 1) -> dict[str, Any]:
    """A model with a bias on query, key and value: its ways to a logprob, then the bias lost in the live engine."""
    code = {"trust_remote_code": True, "tensor_parallel_size": tp}
    asked = prompts()[:16]
    llm, rollout = start(contract, first, dtype, **code)
    whole, _ = sample(llm, rollout, asked)
    found: dict[str, Any] = {"tokens": tokens(whole), "decode": bits(whole)}
    found["prefill"] = bits(rollout.rescore(whole, step=0))
    found["reports"] = reports(rollout)
    found["weights"] = rollout.weights(step=0)
    if tp == 1:
        found["census"] = census(llm)
        found["calls"] = llm.collective_rpc("isoexec_report", timeout=60)[0]["calls"]
        found |= lost_bias(llm, rollout, whole)
    stop(llm)
    if tp == 1:
        chunks = {"enable_chunked_prefill": True, "max_num_seqs": 16, "max_num_batched_tokens": 48}
        llm, rollout = start(
            contract, first, dtype, enable_prefix_caching=True, block_size=32, **chunks, **code
        )
        found["chunked"] = bits(rollout.rescore(whole, step=0))
        found |= prefix_hits(llm, rollout, prompts(head=96)[:2])
        stop(llm)
    return found


def lost_bias(llm: Any, rollout: Any, whole: Any) -> dict[str, Any]:
    """The bias of one layer gone in three ways, each undone: what the report, the digests and the bits say."""
    layer = llm.llm_engine.model_executor.driver_worker.worker.get_model().model.layers[1].self_attn.qkv_proj
    method, bias = layer.quant_method, layer.bias
    found: dict[str, Any] = {}
    apply = method.apply
    method.apply = lambda layer, x, _bias=None: apply(layer, x)
    found["dropped_report"] = reports(rollout)[0]["problems"]
    found["dropped"] = bits(rollout.rescore(whole, step=0))
    del method.apply
    layer.bias = None
    found["absent_report"] = reports(rollout)[0]["problems"]
    layer.bias = bias
    kept = bias.data.clone()
    bias.data.zero_()
    found["zeroed"] = bits(rollout.rescore(whole, step=0))
    found["zeroed_weights"] = rollout.weights(step=0)
    bias.data.copy_(kept)
    found["again"] = bits(rollout.rescore(whole, step=0))
    return found


def native_bias(first: str) -> dict[str, Any]:
    """Digests of what can be read of a native MiMo."""
    llm, _ = start(None, first, "bfloat16", trust_remote_code=True)
    found = llm.collective_rpc("isoexec_weight_partials", timeout=60)[0]["tensors"]
    stop(llm)
    return {"weights": found}


def bias_alone(contract: str, first: str) -> dict[str, Any]:
    """MiMo with the contract's bias on the engine's own packed linears."""
    os.environ["ISOEXEC_ENFORCE"] = "column_linear=off"
    llm, rollout = start(contract, first, "bfloat16", trust_remote_code=True)
    got, _ = sample(llm, rollout, prompts()[:4])
    found = {"report": reports(rollout)[0], "decode": bits(got)}
    stop(llm)
    return found


def misfits(
    mimo: str, qwen3: str, mimo_contract: str, qwen3_contract: str, short_contract: str
) -> dict[str, str]:
    """Each of two models under the other's contract and one that lacks a region, and MiMo's class of the engine's own."""
    from vllm import LLM, ModelRegistry
    from vllm.model_executor.models.mimo import MiMoForCausalLM
    from vllm.plugins import load_general_plugins

    from isoexec.adapters.vllm.adapter import engine_args
    from isoexec.adapters.vllm.rollout import Rollout

    def build(contract: str, model: str, native: bool, **more: Any) -> str:
        asked = engine_args(contract, **arguments(model, "bfloat16", trust_remote_code=True, **more))
        if native:
            load_general_plugins()
            ModelRegistry.register_model("MiMoForCausalLM", MiMoForCausalLM)
        Rollout(LLM(**asked))
        return "started"

    biased = {"hf_overrides": {"attention_bias": True}}
    cases: dict[str, tuple[Any, ...]] = {
        "mimo_under_qwen3": (qwen3_contract, mimo, False),
        "qwen3_under_mimo": (mimo_contract, qwen3, False),
        "native_class": (mimo_contract, mimo, True),
        "short": (short_contract, qwen3, False),
    }
    found = {name: in_child(functools.partial(build, *case)) for name, case in cases.items()}
    found["biased_qwen3"] = in_child(functools.partial(build, qwen3_contract, qwen3, False, **biased))
    return found
