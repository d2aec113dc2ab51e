# SPDX-License-Identifier: Apache-2.0
"""The demo's rollout engine: a real vLLM in a process of its own, watched, with its weights replaced at each step."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from vllm import LLM, SamplingParams, TokensPrompt

from isoexec.adapters.demo.memory import peak_bytes
from isoexec.adapters.demo.profiling import worker_python
from isoexec.adapters.vllm.adapter import VllmAdapter, engine_args
from isoexec.adapters.vllm.rollout import Rollout, exact_float32
from isoexec.contracts.errors import InstallError
from isoexec.probes.client import Client, ProbeSettings

__all__ = ["EngineHost", "logprobs_of"]

_log = structlog.get_logger("isoexec.demo")
_KV_BYTES = 128 << 20
_ON_CPU: dict[str, Any] = {
    "enforce_eager": True,
    "max_num_batched_tokens": 8192,
    "enable_chunked_prefill": False,
    "enable_prefix_caching": False,
    "kv_cache_memory_bytes": _KV_BYTES,
}
"""On a GPU the engine keeps its own defaults: graphs, compilation, chunked prefill, prefix caching, scheduling ahead."""


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
        one_in: int = 1,
        transport: str = "file",
    ) -> None:
        self._client = Client(ProbeSettings.from_env(), "engine")
        self._client.connect()  # a contract that differs from the run's is refused here, before an engine exists
        arguments: dict[str, Any] = {
            "model": model,
            "dtype": dtype,
            "tensor_parallel_size": tp,
            "skip_tokenizer_init": True,
            "max_model_len": max_length,
            "max_num_seqs": batch,
            "logprobs_mode": "processed_logprobs",
            "seed": 0,
            "trust_remote_code": True,  # the checkpoints are this demo's own; MiMo's holds its configuration class
            **({} if torch.cuda.is_available() else _ON_CPU),
            **more,
        }
        if contract is not None:
            arguments["worker_extension_cls"] = "isoexec.adapters.demo.faults.FaultExtension"
        if transport == "handles":
            from isoexec.adapters.vllm.transfer import receiving

            arguments |= receiving()
        self._llm = LLM(**engine_args(contract, **arguments))
        self._rollout = Rollout(self._llm, self._client, one_in=one_in)
        self._silent = False
        self._profile: tuple[str, Path] | None = None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        step: int,
        version: int,
        length: int | Sequence[int],
        temperature: float = 1.0,
        watched: bool = True,
        rescore: int = 0,
        seed: int | None = 0,
        logprobs: bool = False,
    ) -> dict[str, Any]:
        """Sample ``length`` tokens (one number, or one a prompt) to each prompt; ``rescore`` sequences are also read back.

        Returns responses (token ids), with ``logprobs`` also those, float32 by sequence, and the seconds of generation, of the
        rescore, and of the probe.
        """
        lengths = [length] * len(prompts) if isinstance(length, int) else list(length)
        params = [
            SamplingParams(
                temperature=temperature,
                seed=None if seed is None else seed + 1000 * step + i,
                max_tokens=lengths[i],
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
            "logprobs": [logprobs_of(o.outputs[0]) for o in outputs] if logprobs else None,
            "cached": sum(o.num_cached_tokens or 0 for o in outputs),
            "seconds": {
                "generation": generated - start,
                "probe": probed - generated,
                "rescore": rescored - probed,
            },
        }

    def sync(self, path: str, *, version: int, step: int, watched: bool = True) -> float:
        """Load the weights of ``version``; returns the seconds of their digests."""
        self._llm.collective_rpc("isoexec_load_weights", timeout=60.0, args=(path, version))
        return self._loaded(version=version, step=step, watched=watched)

    def receive(
        self, handles: Sequence[Sequence[Any]], *, version: int, step: int, watched: bool = True
    ) -> float:
        """Like `sync`, from the memory of a trainer on this host (`isoexec.adapters.handles`)."""
        from isoexec.adapters.vllm.transfer import receive

        receive(self._llm, handles, version)
        return self._loaded(version=version, step=step, watched=watched)

    def _loaded(self, *, version: int, step: int, watched: bool) -> float:
        try:
            self._rollout.reset_cache()
        except InstallError as error:
            # what is wrong with the cache is attested until a reset holds: this job wants to see it found by the daemon
            _log.error("prefix cache kept", found=error.found, fix=error.fix)
        self._rollout.weight_version = version
        return self.digest(version=version, step=step) if watched else 0.0

    def digest(self, *, version: int, step: int) -> float:
        """Digest the live weights as ``version``; returns the seconds it took."""
        start = time.perf_counter()
        if not self._silent:
            self._rollout.weights(step=step, weight_version=version)
        return time.perf_counter() - start

    def attest(self, *, version: int, step: int) -> None:
        """Attest every worker."""
        if not self._silent:
            # what a region binds is judged by the daemon here: this job wants to see it found there
            self._rollout.attest("sync", step=step, weight_version=version, require=False)

    def digests(self) -> dict[str, tuple[int, int]]:
        """Digests of the live weights by Hugging Face name; those that can't be read are not there."""
        return self._rollout.weights(step=0)

    def census(self) -> bool:
        """Whether all arithmetic that makes a sampled token's logprob is in regions of the contract."""
        return VllmAdapter(self._llm).census().clean_in("engine_decode")

    def keep_cache(self) -> None:
        """Fault: the engine says that its prefix cache was reset, and it was not."""
        self._llm.reset_prefix_cache = lambda *_, **__: True

    def replace_norm(self, rank: int | None = None) -> list[str]:
        """Fault: bind the engine's own norm again in one layer of every worker, or of the one of ``rank``; names of layers."""
        found = self._llm.collective_rpc("demo_replace_norm", timeout=60.0, args=(rank,))
        return [name for name in found if name is not None]

    def silence(self) -> None:
        """Fault: the engine's probe says nothing any more, while the engine goes on."""
        self._silent = True

    def profiling(self, profile: tuple[str, Path] | None) -> None:
        """Profile the engine's workers from now on, by a kind of `profiling.KINDS` into a folder; None ends it.

        The engine's own profiler runs where its arguments ask for one (``profiler_config``); Python's needs a driver that may
        send functions to the workers (VLLM_ALLOW_INSECURE_SERIALIZATION).
        """
        for one, on in ((self._profile, False), (profile, True)):
            if one is None:
                continue
            kind, folder = one
            if kind == "python":
                to = None if on else str(folder / "worker-python")
                self._llm.collective_rpc(worker_python, args=(os.getpid(), to))
            elif self._llm.llm_engine.vllm_config.profiler_config.profiler is not None:
                (self._llm.start_profile if on else self._llm.stop_profile)()
        self._profile = profile

    def memory(self) -> int:
        """Bytes in use on the GPU now, by every process, for the workers are others; without one this process's peak."""
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            return total - free
        return peak_bytes(torch.device("cpu"))

    def close(self) -> dict[str, float]:
        """End the watch; returns what the probe cost: seconds spent in ``send`` and messages dropped."""
        self._client.close()
        self._llm.llm_engine.engine_core.shutdown()  # its workers are processes of their own, and would stay
        stats = self._client.stats
        return {"seconds": stats.seconds, "dropped": stats.dropped, "sent": stats.sent}


def logprobs_of(completion: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The sampled tokens' logprobs of one completion, float32 by token."""
    values = [
        entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
    return exact_float32(values, "sampled logprobs")
