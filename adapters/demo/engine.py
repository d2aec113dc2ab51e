# SPDX-License-Identifier: Apache-2.0
"""The demo's rollout engine: a real vLLM in a process of its own, watched, with its weights replaced at each step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt

from isoexec.adapters.vllm.adapter import engine_args
from isoexec.adapters.vllm.rollout import Rollout
from isoexec.probes.client import Client, ProbeSettings

__all__ = ["EngineHost"]

_KV_BYTES = 128 << 20


class EngineHost:
    """Built inside the engine's process; its methods are called by the driver.  Seconds in every answer are wall time."""

    def __init__(
        self,
        *,
        model: str,
        contract: str | None,
        tp: int,
        dtype: str,
        max_length: int,
        batch: int,
        more: dict[str, Any],
    ) -> None:
        self._client = Client(ProbeSettings.from_env(), "engine")
        self._client.connect()  # a contract that differs from the run's is refused here, before an engine exists
        arguments: dict[str, Any] = {
            "model": model,
            "dtype": dtype,
            "tensor_parallel_size": tp,
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "max_model_len": max_length,
            "max_num_seqs": batch,
            "max_num_batched_tokens": 8192,
            "enable_chunked_prefill": False,
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": _KV_BYTES,
            "logprobs_mode": "processed_logprobs",
            "seed": 0,
            "trust_remote_code": True,  # the checkpoints are this demo's own; MiMo's holds its configuration class
            **more,
        }
        if contract is not None:
            arguments["worker_extension_cls"] = "isoexec.adapters.demo.faults.FaultExtension"
        self._llm = LLM(**engine_args(contract, **arguments))
        self._rollout = Rollout(self._llm, self._client)
        self._silent = False

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        step: int,
        version: int,
        length: int,
        temperature: float = 1.0,
        watched: bool = True,
        rescore: int = 0,
        seed: int | None = 0,
    ) -> dict[str, Any]:
        """Sample ``length`` tokens to each prompt; ``rescore`` sequences are also read back as prompts.

        Returns responses (token ids), the seconds of generation, of the rescore, and of the probe.
        """
        params = [
            SamplingParams(
                temperature=temperature,
                seed=None if seed is None else seed + 1000 * step + i,
                max_tokens=length,
                logprobs=0,
                ignore_eos=True,
                detokenize=False,
            )
            for i in range(len(prompts))
        ]
        start = time.perf_counter()
        outputs = self._llm.generate(
            [TokensPrompt(prompt_token_ids=list(p)) for p in prompts], params, use_tqdm=False
        )
        generated = time.perf_counter()
        rescored = probed = generated
        if watched and not self._silent:
            found = self._rollout.record(outputs, step=step, weight_version=version, temperature=temperature)
            probed = rescored = time.perf_counter()
            if rescore:
                self._rollout.rescore(found[:rescore], step=step, weight_version=version)
                rescored = time.perf_counter()
        return {
            "responses": [list(o.outputs[0].token_ids) for o in outputs],
            "cached": sum(o.num_cached_tokens or 0 for o in outputs),
            "seconds": {
                "generation": generated - start,
                "probe": probed - generated,
                "rescore": rescored - probed,
            },
        }

    def sync(self, path: str, *, version: int, step: int, watched: bool = True) -> float:
        """Load the weights of ``version``; returns the probe's seconds (digests and attestation)."""
        self._llm.collective_rpc("isoexec_load_weights", timeout=60.0, args=(path, version))
        self._rollout.reset_cache()
        self._rollout.weight_version = version
        return self.attest(version=version, step=step) if watched else 0.0

    def attest(self, *, version: int, step: int) -> float:
        """Digest the live weights as ``version`` and attest every worker; returns the seconds it took."""
        start = time.perf_counter()
        if not self._silent:
            self._rollout.weights(step=step, weight_version=version)
            # what a region binds is judged by the daemon here: this job wants to see it found there
            self._rollout.attest("sync", step=step, weight_version=version, require=False)
        return time.perf_counter() - start

    def replace_norm(self) -> list[str]:
        """Fault: bind the engine's own norm again in one layer of every worker."""
        return [str(n) for n in self._llm.collective_rpc("demo_replace_norm", timeout=60.0)]

    def silence(self) -> None:
        """Fault: the engine's probe says nothing any more, while the engine goes on."""
        self._silent = True

    def close(self) -> dict[str, float]:
        """End the watch; returns what the probe cost: seconds spent in ``send`` and messages dropped."""
        self._client.close()
        self._llm.llm_engine.engine_core.shutdown()  # its workers are processes of their own, and would stay
        stats = self._client.stats
        return {"seconds": stats.seconds, "dropped": stats.dropped, "sent": stats.sent}
