# SPDX-License-Identifier: Apache-2.0
"""What a rollout loop adds to be watched: ``Rollout(llm, client)`` once, ``record`` after each ``generate``.

::

    llm = LLM(**engine_args(contract, model=..., dtype="bfloat16"))
    rollout = Rollout(llm, client)                     # every worker proves what it binds, or this raises
    outputs = llm.generate(prompts, params)            # params with logprobs=0
    rollout.record(outputs, step=step, weight_version=version)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from isoexec.adapters.base import Report, contract_from_env
from isoexec.adapters.vllm.adapter import collect_reports, report_of
from isoexec.adapters.vllm.prefix import PrefixProbe
from isoexec.contracts.errors import InstallError, IsoExecError
from isoexec.probes.attest import send_attestation
from isoexec.probes.client import Client
from isoexec.probes.contract import contract_now
from isoexec.probes.logprobs import LogprobTap, ScoredSequence
from isoexec.probes.timing import VerifyPeriod
from isoexec.probes.weights import add_partials

__all__ = ["Rollout", "exact_float32"]

_log = structlog.get_logger("isoexec.adapters")


def exact_float32(values: Sequence[float], what: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Python floats as the float32 values they are; refuses a value that is none, for rounding it would hide a mismatch."""
    wide = np.asarray(values, np.float64)
    narrow = wide.astype(np.float32)
    if not np.array_equal(narrow.astype(np.float64), wide, equal_nan=True):
        raise IsoExecError(
            f"{what}: not float32 values; record what the engine computed, before any conversion"
        )
    return narrow


class Rollout:
    """Records one ``LLM``'s token logprobs, attests its workers, loads weights into it.

    ``client`` sends to the daemon; without one, everything is returned and nothing sent.  ``one_in`` records every n-th
    sequence, the same ones as the trainer.  ``timeout`` is in seconds, per question to the workers.
    """

    def __init__(
        self,
        llm: Any,
        client: Client | None = None,
        *,
        one_in: int = 1,
        timeout: float = 60.0,
        weight_version: int = 0,
        attest: bool = True,
    ) -> None:
        self.llm = llm
        self.client = client
        self.timeout = timeout
        self.weight_version = weight_version
        self.contract = client.settings.contract if client is not None else contract_from_env()
        self._tap = LogprobTap(client, one_in=one_in) if client is not None else None
        self._mode = str(llm.llm_engine.model_config.logprobs_mode)
        self._length = int(llm.llm_engine.model_config.max_model_len)
        self._period = VerifyPeriod()
        self._cache_problem: str | None = None
        if attest:
            self.attest("start", step=0)

    def record(
        self,
        outputs: Iterable[Any],
        *,
        step: int,
        weight_version: int | None = None,
        temperature: float = 1.0,
    ) -> list[ScoredSequence]:
        """Token ids and sampled logprobs of finished requests, sent as case ``engine_decode``.

        Raises IsoExecError for an output without logprobs: sample with ``SamplingParams(logprobs=0)``.  Where the last look at
        the workers is ``ISOEXEC_VERIFY_SECONDS`` ago they are attested again, and `attest` may raise.
        """
        found = [self._sampled(o, c) for o in outputs for c in o.outputs if len(c.token_ids)]
        self._send("engine_decode", found, step, weight_version, temperature)
        if self.client is not None and self._period.due:
            self.attest("periodic", step=step, weight_version=weight_version)
        return found

    def rescore(
        self,
        sequences: Sequence[ScoredSequence],
        *,
        step: int,
        weight_version: int | None = None,
        temperature: float = 1.0,
    ) -> list[ScoredSequence]:
        """Let the engine read sequences as prompts, sent as case ``engine_prefill``: a third witness beside the trainer.

        Sequences that fill the engine's whole length cannot be read with room for a token and are left out.  Raises
        IsoExecError at a temperature other than 1 with processed logprobs: prompt tokens skip the sampling processors.
        """
        from vllm import SamplingParams, TokensPrompt

        if self._mode != "raw_logprobs" and temperature != 1.0:
            raise IsoExecError(
                f"rescore: prompt logprobs are at temperature 1, the rollout's {self._mode} at {temperature}; "
                f"use raw_logprobs"
            )
        kept = [s for s in sequences if len(s.prompt) + len(s.response) < self._length]
        outputs = self.llm.generate(
            [TokensPrompt(prompt_token_ids=[*s.prompt, *s.response]) for s in kept],
            SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False),
            use_tqdm=False,
        )
        found = []
        for s, output in zip(kept, outputs, strict=True):
            scored = output.prompt_logprobs[len(s.prompt) :]
            values = [entry[token].logprob for token, entry in zip(s.response, scored, strict=True)]
            found.append(
                ScoredSequence(
                    prompt=s.prompt, response=s.response, logprobs=exact_float32(values, "prompt logprobs")
                )
            )
        self._send("engine_prefill", found, step, weight_version, temperature)
        return found

    def attest(
        self, reason: str, *, step: int, weight_version: int | None = None, require: bool = True
    ) -> list[Report]:
        """One report a worker, each sent as an attestation; then InstallError where a region that must refuse does not hold.

        ``reason`` is start, sync or periodic.  Raises HandshakeError, naming the fields, where the contract of a worker, or the
        contract's file, is no longer the one this process greeted the daemon with.
        """
        raws = collect_reports(self.llm, self.timeout)
        held = []
        reports = [report_of(raw, self.contract) for raw in raws]
        for raw, report in zip(raws, reports, strict=True):
            if self.client is not None:
                held.append(
                    contract_now(
                        self.client.settings, raw.get("contract"), who=f"the worker of rank {report.rank}"
                    )
                )
                send_attestation(
                    self.client,
                    contract=held[-1],
                    reason=reason,
                    step=step,
                    weight_version=self._version(weight_version),
                    topology=report.topology,
                    regions={r.region: r.to_dict() for r in report.regions},
                    environment_found=raw["environment"],
                    rank=report.rank,
                    world=report.world,
                    problem=report.changed or self._cache_problem,
                )
        self._period.done()
        if require:
            broken = any(report.problems() for report in reports) or not all(one.agrees for one in held)
            if broken and self.client is not None:
                self.client.flush()  # what is raised here may end the process, and the daemon must know why
            for report in reports:
                report.require()
            for one in held:
                one.require()
        return reports

    def sync(
        self,
        weights: Path | str | Sequence[Sequence[Any]],
        weight_version: int,
        *,
        step: int,
        attest: bool = True,
    ) -> dict[str, tuple[int, int]]:
        """Load weights into every worker, forget the prefix cache, digest and attest.

        ``weights`` are a safetensors file of Hugging Face names, or [name, handle] of each tensor in the memory of a trainer on
        this host (`isoexec.adapters.handles`), for an engine started with `isoexec.adapters.vllm.transfer.receiving`; when this
        returns they have been read.  To be called between steps, with no request running.  Returns the digests of the live
        tensors by name.  A loop whose trainer scores while the engine waits takes ``attest=False`` and calls `attest` then: it
        costs no time there, and proves what has sampled before anything is trained on it.
        """
        if isinstance(weights, str | Path):
            self.llm.collective_rpc(
                "isoexec_load_weights",
                timeout=self.timeout,
                args=(str(Path(weights).resolve()), weight_version),
            )
        else:
            from isoexec.adapters.vllm.transfer import receive

            receive(self.llm, weights, weight_version)
        self.reset_cache()
        self.weight_version = weight_version
        digests = self.weights(step=step)
        if attest:
            self.attest("sync", step=step)
        return digests

    def reset_cache(self) -> None:
        """Forget every cached block; keys and values of old weights are never read under new ones.

        It is looked at, not believed: a prompt that came from the cache before must not come from it afterwards. Raises
        InstallError where it does, or where a contract is in force and the cache cannot be looked into; what is wrong is
        attested until a later reset holds.
        """
        probe = PrefixProbe(self.llm)
        seen = probe.needed and probe.seen()
        self._cache_problem = "prefix cache: not reset since the last weight load"
        if not self.llm.reset_prefix_cache():
            raise self._kept("blocks still in use", "finish or abort the running requests before a sync")
        kept = probe.hits() if seen else 0
        if kept:
            raise self._kept(
                f"{kept} of {probe.length} tokens of a probe still come from it, although the engine said that it was reset",
                "turn prefix caching off (enable_prefix_caching=False), or use an engine whose reset_prefix_cache works",
            )
        if probe.needed and not seen:
            error = self._kept(
                "a probe's own prompt, asked twice, never comes from it, so nobody can see whether it is empty",
                "turn prefix caching off (enable_prefix_caching=False)",
            )
            if self.contract is not None:
                raise error
            _log.warning("prefix cache not verified", found=error.found, fix=error.fix)
            return
        self._cache_problem = None

    def _kept(self, found: str, fix: str) -> InstallError:
        self._cache_problem = f"prefix cache after a weight load: {found}"
        return InstallError(
            region="attention", wanted="an empty prefix cache after a weight load", found=found, fix=fix
        )

    def weights(self, *, step: int, weight_version: int | None = None) -> dict[str, tuple[int, int]]:
        """Digests of the live tensors by Hugging Face name, added over the workers and sent; the unreadable are named.

        A name is sent only with what was covered of it: a tensor one worker cannot read stays unknown.
        """
        tensors: dict[str, tuple[int, int]] = {}
        numel: dict[str, int] = {}
        total: dict[str, int] = {}
        unknown: set[str] = set()
        loaded: set[str] = set()  # some element is not zero
        for part in self.llm.collective_rpc("isoexec_weight_partials", timeout=self.timeout):
            unknown.update(part["unknown"])
            loaded.update(part["tensors"].keys() - set(part["zero"]))
            for name, (low, high) in part["tensors"].items():
                tensors[name] = add_partials([tensors.get(name, (0, 0)), (low, high)])
                numel[name] = numel.get(name, 0) + int(part["numel"][name])
                total[name] = int(part["total"][name])
        known = tensors.keys() - unknown
        tensors = {name: tensors[name] for name in sorted(known)}
        if self.client is not None:
            self.client.send_weights(
                weight_version=self._version(weight_version),
                step=step,
                tensors=tensors,
                numel=numel,
                total=total,
                zero=tensors.keys() - loaded,
                unknown=sorted(unknown),
            )
        return tensors

    def _version(self, given: int | None) -> int:
        return self.weight_version if given is None else given

    def _sampled(self, output: Any, completion: Any) -> ScoredSequence:
        if completion.logprobs is None or output.prompt_token_ids is None:
            raise IsoExecError(
                f"request {output.request_id} has no logprobs; sample with SamplingParams(logprobs=0)"
            )
        tokens = [int(t) for t in completion.token_ids]
        values = [entry[token].logprob for token, entry in zip(tokens, completion.logprobs, strict=True)]
        return ScoredSequence(
            prompt=[int(t) for t in output.prompt_token_ids],
            response=tokens,
            logprobs=exact_float32(values, "sampled logprobs"),
            # of several completions vLLM tells the count of one
            prefix_hit=output.num_cached_tokens if len(output.outputs) == 1 else None,
        )

    def _send(
        self,
        case: str,
        found: list[ScoredSequence],
        step: int,
        weight_version: int | None,
        temperature: float,
    ) -> None:
        if self._tap is not None:
            self._tap.record(
                case,
                found,
                step=step,
                weight_version=self._version(weight_version),
                temperature=temperature,
                logprobs_mode=self._mode,
            )
