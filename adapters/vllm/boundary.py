# SPDX-License-Identifier: Apache-2.0
"""What a worker of any engine judges before it serves: its plan from live groups, its process, its settings and its model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from isoexec.adapters.base import Plan
from isoexec.adapters.vllm import state
from isoexec.adapters.vllm.engines import require_engine
from isoexec.adapters.vllm.hooks import mimo, refuse_unless
from isoexec.adapters.vllm.install import plan_engine
from isoexec.adapters.vllm.topology import claimable_environment, live_topology
from isoexec.contracts.diff import disagreements, one_line
from isoexec.contracts.models import text_facts
from isoexec.contracts.parts import Value

__all__ = ["MODES", "check_family", "given_plan", "mark_norms", "plan_worker"]

MODES = ("raw_logprobs", "processed_logprobs")


def given_plan() -> Plan:
    """The plan that the plugin made in this process; InstallError where it made none."""
    plan = state.active()
    refuse_unless(
        plan is not None,
        "engine",
        "a contract in every process",
        "none in this worker",
        "set ISOEXEC_CONTRACT before the engine starts and let VLLM_PLUGINS name isoexec",
    )
    assert plan is not None
    return plan


def plan_worker(config: Any, refuse_of_engine: Callable[[Any], None]) -> Plan:
    """Plan anew from this worker's live groups and make that its plan.

    Raises where the driver has another contract, or for a process, a setting or a model that the contract does not admit;
    ``refuse_of_engine`` takes the engine's config and refuses what only this engine cannot do.
    """
    plan = given_plan()
    said = dict((config.additional_config or {}).get("isoexec", {}))
    mine = plan.contract.to_dict()
    differences = disagreements(said.get("contract", mine), mine)
    refuse_unless(
        not differences,
        "engine",
        "the driver's contract in this worker",
        one_line(differences, "the driver", "this worker"),
        "give every process the same ISOEXEC_CONTRACT",
    )
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    plan = plan_engine(plan.contract, live_topology(), dtype)
    state.activate(plan)
    _refuse_environment(plan.contract)
    refuse_of_engine(config)
    _refuse_outside_domain(config, plan.contract)
    return plan


def check_family(model: nn.Module) -> None:
    """Refuse a model class of the engine's own where the contract needs another."""
    if state.installs("norm") and "MiMoForCausalLM" in state.required("norm").contract.model.architectures:
        mimo().check(model)


def mark_norms(model: nn.Module, kind: Any) -> None:
    """Tell each norm of a model which region it serves."""
    for name, module in model.named_modules():
        if isinstance(module, kind) and name.endswith(("q_norm", "k_norm")):
            module.isoexec_region = "qk_norm"


def model_facts(text: Any, architectures: Iterable[str]) -> dict[str, Value]:
    """Shape facts of a Hugging Face text config, by the contract's names; ContractError for a field that makes no sense."""
    return text_facts(text.to_dict(), tuple(architectures))


def _refuse_drafts(config: Any) -> None:
    """Refuse drafts that the engine's contract does not know."""
    known = require_engine()[0].drafts
    refuse_unless(
        config is None or config.method in known,
        "engine",
        f"drafts by {' or '.join(known)}" if known else "no speculative decoding",
        f"speculative decoding by {getattr(config, 'method', None)}",
    )


def _refuse_outside_domain(config: Any, contract: Any) -> None:
    """Refuse in words every setting of the engine for which the contract holds no function."""
    model, text = config.model_config, config.model_config.hf_text_config
    refuse_unless(config.lora_config is None, "engine", "no LoRA", "LoRA adapters enabled")
    _refuse_drafts(config.speculative_config)
    cache = config.cache_config.cache_dtype
    refuse_unless(
        cache == "auto" or cache == str(model.dtype).removeprefix("torch."),
        "attention",
        "a cache in the model dtype",
        f"cache dtype {cache}",
        "pass kv_cache_dtype='auto'",
    )
    refuse_unless(
        model.logprobs_mode in MODES,
        "logprobs",
        f"logprobs_mode {' or '.join(MODES)}",
        model.logprobs_mode,
    )
    refuse_unless(
        model.head_dtype == model.dtype,
        "lm_head",
        "the head in the model dtype",
        f"head dtype {model.head_dtype}",
    )
    admitted = tuple(contract.model.architectures)
    refuse_unless(
        any(a in admitted for a in model.architectures),
        "model",
        f"an architecture of {list(admitted)}",
        list(model.architectures),
        "choose a contract for this model",
    )
    refusals = contract.model.refusals(model_facts(text, model.architectures))
    refuse_unless(
        not refusals,
        "model",
        f"a model the contract {contract.name} speaks of",
        "; ".join(refusals),
        "choose a contract for this model",
    )
    refuse_unless(
        not getattr(text, "attention_bias", False) or "qkv_bias" in contract.regions,
        "column_linear",
        "no attention bias",
        "attention_bias",
    )
    refuse_unless(
        not getattr(text, "use_sliding_window", False), "attention", "no sliding window", "use_sliding_window"
    )
    rope = getattr(text, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    refuse_unless(kind == "default", "rope", "rotary embedding without scaling", f"rope_type {kind}")
    if state.installs("rope"):
        length = int(state.required("rope").constant("rope", "length"))
        refuse_unless(
            model.max_model_len <= length,
            "rope",
            f"positions below the table's length {length}",
            f"max_model_len {model.max_model_len}",
            f"pass max_model_len={length}",
        )


def _refuse_environment(contract: Any) -> None:
    """Refuse versions and variables of this process that may change a bit."""
    refusals = contract.claims.environment.refusals(claimable_environment())
    refuse_unless(
        not refusals,
        "environment",
        "what the contract was proven on",
        "; ".join(refusals),
        "set it before the engine starts",
    )
