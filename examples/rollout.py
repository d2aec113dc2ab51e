# SPDX-License-Identifier: Apache-2.0
"""An own rollout loop on vLLM that hands sequences to a trainer through a folder; the lines marked `# IsoExec` attach it.

python examples/rollout.py --model MODEL --exchange DIR --steps 3
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np
from vllm import LLM, SamplingParams, TokensPrompt

from isoexec.adapters.vllm.adapter import engine_args  # IsoExec
from isoexec.adapters.vllm.rollout import Rollout  # IsoExec
from isoexec.probes.client import connect  # IsoExec


def wait_for(path: Path, seconds: float = 120.0) -> Path:
    """The other side's file, once it is there (both sides write under another name, then rename)."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not appear in {seconds:.0f} s")
        time.sleep(0.02)
    return path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--exchange", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()

    client = connect("engine")  # IsoExec
    arguments = {
        "model": args.model,
        "dtype": "bfloat16",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 64 << 20,
    }
    llm = LLM(
        **engine_args(os.environ.get("ISOEXEC_CONTRACT"), **arguments)
    )  # IsoExec: instead of LLM(**arguments)
    rollout = Rollout(llm, client)  # IsoExec

    params = SamplingParams(temperature=1.0, max_tokens=32, logprobs=0, ignore_eos=True, detokenize=False)
    for step in range(args.steps):
        weights = wait_for(args.exchange / f"weights-{step}" / "model.safetensors")
        rollout.sync(
            weights, weight_version=step, step=step
        )  # IsoExec: loads the weights, digests and attests them
        rng = np.random.default_rng(step)
        prompts = [[1, *rng.integers(3, 500, 20).tolist()] for _ in range(16)]
        outputs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], params, use_tqdm=False)
        rollout.record(outputs, step=step, weight_version=step)  # IsoExec
        tokens = np.array([p + list(o.outputs[0].token_ids) for p, o in zip(prompts, outputs, strict=True)])
        part = args.exchange / f"rollout-{step}.part.npy"
        np.save(part, tokens)
        part.rename(args.exchange / f"rollout-{step}.npy")
        print(f"step {step}: sampled {tokens.shape[0]} x {tokens.shape[1] - 21} tokens", flush=True)
    client.close()  # IsoExec


if __name__ == "__main__":
    main()
