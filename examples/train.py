# SPDX-License-Identifier: Apache-2.0
"""An own training loop on megatron-core that reads rollouts from a folder; the lines marked `# IsoExec` attach it.

python -m torch.distributed.run --nproc-per-node 2 examples/train.py --model MODEL --exchange DIR --steps 3 --tp 2
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    from isoexec.adapters.megatron import cpu

    cpu.install()  # a job on GPUs has no need of it: megatron-core itself asks for CUDA

import numpy as np
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from isoexec.adapters.megatron.logprobs import score
from isoexec.adapters.megatron.model import build
from isoexec.adapters.megatron.training import Batch, Trainer, group_advantages
from isoexec.adapters.megatron.watch import Watch  # IsoExec
from isoexec.adapters.megatron.weights import save_hf
from isoexec.contracts.errors import HaltedError  # IsoExec
from isoexec.contracts.schema import Contract  # IsoExec
from isoexec.probes.client import connect  # IsoExec

PROMPT = 21


def wait_for(path: Path, seconds: float = 120.0) -> Path:
    """The other side's file, once it is there (both sides write under another name, then rename)."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not appear in {seconds:.0f} s")
        time.sleep(0.02)
    return path


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--exchange", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tp", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel(args.tp, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)

    client = connect("trainer", rank=dist.get_rank(), world=dist.get_world_size())  # IsoExec
    path = os.environ.get("ISOEXEC_CONTRACT")  # IsoExec
    model = build(args.model, contract=Contract.load(path) if path else None)
    trainer = Trainer(model, lr=1e-3, microbatch=16)
    watch = Watch(model, client)  # IsoExec

    try:
        for step in range(args.steps):
            watch.boundary(
                step, checkpoint=lambda: trainer.save_checkpoint(args.exchange / "halted")
            )  # IsoExec
            save_hf(model, args.exchange / f"weights-{step}")
            watch.synced(step, step=step)  # IsoExec
            tokens = torch.from_numpy(np.load(wait_for(args.exchange / f"rollout-{step}.npy")))
            old = score(model, tokens)
            n, length = tokens.shape
            prompts, lengths = [PROMPT] * n, [length] * n
            watch.record(
                "trainer_score", tokens, old, prompts, lengths, step=step, weight_version=step
            )  # IsoExec
            rewards = (tokens[:, PROMPT:] % 4 == 0).float().mean(1)
            result = trainer.train_step(
                Batch(
                    tokens=tokens,
                    mask=(torch.arange(length) >= PROMPT).expand(n, length),
                    advantages=group_advantages(rewards, n),
                    old_logprobs=old,
                )
            )
            if dist.get_rank() == 0:
                print(f"step {step}: reward {rewards.mean():.3f} loss {result.loss:.5f}", flush=True)
    except HaltedError as halted:  # IsoExec
        print(halted, file=sys.stderr)  # IsoExec
        return 0  # IsoExec: torchrun and its like restart what ends with another code
    finally:
        client.close()  # IsoExec
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
