# SPDX-License-Identifier: Apache-2.0
"""Where the engine runs: its parallel degrees by axis, asked for and live, and the environment a contract makes claims of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isoexec.probes.attest import environment

__all__ = ["asked_topology", "claimable_environment", "live_topology"]


def asked_topology(args: Mapping[str, Any]) -> dict[str, int]:
    """Degrees that engine arguments (``LLM(**args)``) will lead to."""
    tp = int(args.get("tensor_parallel_size", 1))
    dp = int(args.get("data_parallel_size", 1))
    decode = int(args.get("decode_context_parallel_size", 1))
    prefill = int(args.get("prefill_context_parallel_size", 1))
    return {
        "TP": tp,
        "EP": tp * dp if args.get("enable_expert_parallel") else 1,
        "ETP": 1,
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
    parallel = config.parallel_config if config is not None else None
    expert = parallel is not None and parallel.enable_expert_parallel
    tp, dp = groups.get_tp_group().world_size, groups.get_dp_group().world_size
    return {
        "TP": tp,
        "EP": tp * dp if expert else 1,
        "ETP": 1,
        "SP": 1,
        "CP": groups.get_dcp_group().world_size * groups.get_pcp_group().world_size,
        "PP": groups.get_pp_group().world_size,
        "DP": dp,
    }


def claimable_environment() -> dict[str, Any]:
    """Versions, arch and variables of this process under the names a contract uses."""
    return {name.removeprefix("env:"): value for name, value in environment().items()}
