# SPDX-License-Identifier: Apache-2.0
"""Real ranks over gloo run the sm90 latent attention in Triton's interpreter, and print `{check: elements that differ}` as JSON.

Each holds some of the heads; what they exchange is the chain of the keys' gradients.
"""

from __future__ import annotations

import json
import sys

import emulation  # type: ignore[import-not-found]  # noqa: F401 - the interpreter is asked for before anything imports triton
import torch
from gated import replace  # type: ignore[import-not-found]  # and the ops get CPU kernels
from torch import Tensor
from torch.distributed import ProcessGroup

from isoexec.kernels.gates import ranks
from isoexec.kernels.gates.checking import differing
from isoexec.kernels.latent_attention.hopper import gate, ops

replace(ops, HARDWARE=False)
GIVEN = (4, 64, (45, 1, 20), "cpu")  # heads, keys of a segment, sequences


def heads(rank: int, size: int, group: ProcessGroup | None) -> list[Tensor]:
    """Result and gradients of a rank's heads; found here by name, so that its process has CPU kernels."""
    return gate._ranked(rank, size, group, *GIVEN)


def main() -> None:
    whole = heads(0, 1, None)
    results: dict[str, int] = {}
    for size in (2, 4):
        parts = ranks.launch(size, heads, ())
        for i, what in enumerate(("output", "gradient of rotated queries", "gradient of latent queries")):
            results[f"{size} ranks, {what}"] = differing(torch.cat([part[i] for part in parts], 1), whole[i])
        for rank, part in enumerate(parts):
            for i, what in ((3, "rotated keys"), (4, "latent rows")):
                results[f"rank {rank} of {size}, gradient of {what}"] = differing(part[i], whole[i])
    alone = [heads(rank, 2, None) for rank in range(2)]
    results["control: gradients of two ranks added up"] = differing(alone[0][4] + alone[1][4], whole[4])
    json.dump(results, sys.stdout)
