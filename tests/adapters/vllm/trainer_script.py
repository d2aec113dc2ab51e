# SPDX-License-Identifier: Apache-2.0
"""The trainer beside the engine: real megatron-core ranks score sequences that the engine sampled; asked in JSON on stdin."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch


def rank_main(rank: int, asked: dict[str, Any], folder: str) -> None:
    """Score every set of sequences in this rank's part of the model; rank 0 writes the logprobs as int32."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from isoexec.adapters.megatron import cpu
    from isoexec.adapters.megatron.logprobs import score
    from isoexec.adapters.megatron.model import build
    from isoexec.contracts.schema import Contract

    torch.set_num_threads(1)
    cpu.install()
    ranks = asked["tp"]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(
        ranks,
        1,
        expert_model_parallel_size=asked["ep"],
        expert_tensor_parallel_size=ranks // asked["ep"],
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)
    contract = Contract.load(asked["contract"]) if asked["contract"] else None
    found = []
    for one in asked["sets"]:
        model = build(one["model"], dtype=getattr(torch, one["dtype"]), contract=contract)
        rows = [p + t for p, t in zip(one["prompts"], one["tokens"], strict=True)]
        padded = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        for i, row in enumerate(rows):
            padded[i, : len(row)] = torch.tensor(row)
        scores = score(model, padded).view(torch.int32)
        found.append(
            [s[len(p) : len(r)].tolist() for s, p, r in zip(scores, one["prompts"], rows, strict=True)]
        )
    if rank == 0:
        Path(folder, "out.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Fork the ranks, Megatron imported once before."""
    from torch.multiprocessing.spawn import start_processes

    import isoexec.adapters.megatron.cpu

    isoexec.adapters.megatron.cpu.install()
    import isoexec.adapters.megatron.model

    os.environ["OMP_NUM_THREADS"] = "1"
    asked = json.loads(sys.stdin.read())
    start_processes(rank_main, args=(asked, asked["folder"]), nprocs=asked["tp"], start_method="fork")


if __name__ == "__main__":
    main()
