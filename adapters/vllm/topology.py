# SPDX-License-Identifier: Apache-2.0
"""Where the engine runs: its parallel degrees by axis, asked for and live, and the environment a contract makes claims of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isoexec.probes.attest import environment

__all__ = ["asked_topology", "claimable_environment", "live_topology"]


def asked_topology(args: Mapping[str, Any], *, experts: bool) -> dict[str, int]:
    """Degrees that engine arguments (``LLM(**args)``) will lead to, for a model with ``experts`` or without.

    For experts the engine flattens its tensor, data and prefill-context ranks: whole ones a rank with
    ``enable_expert_parallel``, or else a slice of each.
    """
    tp = int(args.get("tensor_parallel_size", 1))
    dp = int(args.get("data_parallel_size", 1))
    decode = int(args.get("decode_context_parallel_size", 1))
    prefill = int(args.get("prefill_context_parallel_size", 1))
    flat = tp * dp * prefill
    whole = bool(args.get("enable_expert_parallel"))
    return {
        "TP": tp,
        "EP": flat if whole else 1,
        "ETP": flat if experts and not whole else 1,
        "SP": 1,
        "CP": decode * prefill,
        "PP": int(args.get("pipeline_parallel_size", 1)),
        "DP": dp,
    }


def live_topology() -> dict[str, int]:
    """Degrees of the groups this worker is in; to be called after its distributed environment is up."""
    from vllm.config import get_current_vllm_config_or_none
    from vllm.distributed import parallel_state as groups

    config = get_current_vllm_config_or_none()
    whole = config is not None and config.parallel_config.enable_expert_parallel
    experts = config is not None and config.model_config.get_num_experts() > 0
    tp, dp, prefill = (
        g().world_size for g in (groups.get_tp_group, groups.get_dp_group, groups.get_pcp_group)
    )
    return {
        "TP": tp,
        "EP": groups.get_ep_group().world_size if whole else 1,
        "ETP": tp * dp * prefill if experts and not whole else 1,
        "SP": 1,
        "CP": groups.get_dcp_group().world_size * prefill,
        "PP": groups.get_pp_group().world_size,
        "DP": dp,
    }


def claimable_environment() -> dict[str, Any]:
    """Versions, arch and variables of this process under the names a contract uses."""
    return {name.removeprefix("env:"): value for name, value in environment().items()}
