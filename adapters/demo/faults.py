# SPDX-License-Identifier: Apache-2.0
"""The faults the demo can plant, and what the daemon must make of each; none of this code runs in a job of a user's."""

from __future__ import annotations

import types
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

__all__ = ["FAULTS", "Fault", "FaultExtension", "edited_contract"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A planted fault: what is done, and the verdict and the rules of which one must name it."""

    name: str
    what: str
    rules: tuple[str, ...]
    outcome: str
    alert: str
    engine_tp: int = 1
    trainer_tp: int = 1


FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(
            name="topology",
            what="the trainer's tensor-parallel groups are rebuilt with one rank each under live layers",
            rules=("topology",),
            outcome="violation",
            alert="IsoexecTopologyClaimBroken",
            trainer_tp=2,
        ),
        Fault(
            name="kernel",
            what="one layer of the engine is bound to the engine's own norm again",
            rules=("kernel_replaced", "canary"),
            outcome="violation",
            alert="IsoexecKernelReplaced",
        ),
        Fault(
            name="one-rank",
            what="one layer of the engine's last rank alone is bound to the engine's own norm again",
            rules=("kernel_replaced", "canary"),
            outcome="violation",
            alert="IsoexecKernelReplaced",
            engine_tp=2,
        ),
        Fault(
            name="digest",
            what="the engine starts with a contract that lets a prefix cache outlive a weight sync",
            rules=("handshake",),
            outcome="violation",
            alert="IsoexecContractDigestMismatch",
        ),
        Fault(
            name="stale-weights",
            what="the engine misses one weight sync and goes on as if it had it",
            rules=("weights_stale", "weights_unequal"),
            outcome="violation",
            alert="IsoexecWeightsStale",
        ),
        Fault(
            name="kept-cache",
            what="the engine says that its prefix cache was reset at a weight sync, and keeps it",
            rules=("environment",),
            outcome="violation",
            alert="IsoexecEnvironmentDiffers",
        ),
        Fault(
            name="temperature",
            what="the engine samples at temperature 0.7, the trainer scores at 1",
            rules=("sampling",),
            outcome="violation",
            alert="IsoexecSamplingDiffers",
        ),
        Fault(
            name="silence",
            what="the engine's probe says nothing any more while the engine goes on",
            rules=("unobserved",),
            outcome="unknown",
            alert="IsoexecRunHalted",
        ),
        Fault(
            name="daemon-killed",
            what="the daemon is killed with SIGKILL; the run is declared fail_closed",
            rules=("lease_lost",),
            outcome="unknown",
            alert="IsoexecDaemonDown",
        ),
    )
}


def edited_contract(source: Path, target: Path, edit: dict[str, Any]) -> Path:
    """Write a contract file with values replaced; ``edit`` maps a dotted path (``claims.topology.trainer.TP``) to its value.

    A list is entered by ``key=value`` of one of its maps: ``composition.region=attention.constants.kv_segment``.
    """
    data = yaml.safe_load(source.read_text())
    for path, value in edit.items():
        *way, last = path.split(".")
        at: Any = data
        for part in way:
            name, _, wanted = part.partition("=")
            at = next(item for item in at if item[name] == wanted) if wanted else at[part]
        at[last] = deepcopy(value)  # a value that is given twice would be an anchor
    target.write_text(yaml.safe_dump(data, sort_keys=False))
    return target


class FaultExtension:
    """Methods the demo calls in the engine's workers to break them; mixed in beside the adapter's own."""

    model_runner: Any
    rank: int

    def demo_replace_norm(self, rank: int | None = None) -> str | None:
        """Bind the engine's own RMSNorm in the first layer: what another plugin, or a dispatch change, would do.

        With ``rank``, in that worker alone; the others give None.
        """
        if rank not in (None, self.rank):
            return None
        from vllm.model_executor.layers.layernorm import RMSNorm

        for name, module in self.model_runner.get_model().named_modules():
            if name.endswith("input_layernorm"):
                module._forward_method = types.MethodType(RMSNorm.forward_native, module)
                return str(name)
        raise LookupError("the model has no input_layernorm")
