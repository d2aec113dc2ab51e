# SPDX-License-Identifier: Apache-2.0
"""The census of a vLLM worker: the steps that read a prompt, and those that decode, on whatever model runner it has.

Run as a module it starts an engine in a process of its own: ``python -m isoexec.adapters.vllm.census``, by `isoexec census`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from isoexec.adapters.census import Census, CensusEntry, load_allowed, main
from isoexec.adapters.recorder import Recorder
from isoexec.adapters.vllm import state
from isoexec.adapters.vllm.engines import require_engine, sized_cache
from isoexec.contracts.errors import InstallError
from isoexec.contracts.schema import Contract

__all__ = ["CASES", "WorkerCensus", "census"]

CASES = ("engine_decode", "engine_prefill")
_PROMPT = [3, 4, 5, 6, 7]
_STEPS = ("execute_model", "sample_tokens")


class WorkerCensus:
    """Watches the two step methods of a model runner between `start` and `stop`; a step belongs to the case it is of."""

    def __init__(self, runner: Any, case: str) -> None:
        from isoexec.adapters.vllm.objects import modules_of  # imports the engine

        self._runner = runner
        config = runner.vllm_config
        if not config.model_config.enforce_eager:
            raise InstallError(
                region="census",
                wanted="an engine started with enforce_eager=True",
                found="one that compiles or captures its steps: nothing sees what runs within",
                fix="take the census of an eager engine (isoexec census does), once for a contract and a build",
            )
        self._recorder = Recorder(case, modules_of(runner), inside=state.inside_region)
        self._watches = False

    def start(self) -> None:
        """Wrap the runner's step methods."""
        for name in _STEPS:
            setattr(self._runner, name, self._watched(getattr(self._runner, name)))

    def stop(self) -> dict[str, Any]:
        """Undo `start`; what was seen, as builtins."""
        for name in _STEPS:
            delattr(self._runner, name)  # the class's method is under it
        return {
            "case": self._recorder.case,
            "inside": self._recorder.inside,
            "entries": [e.to_dict() for e in self._recorder.entries()],
        }

    def _watched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if method.__name__ == "execute_model":
                new = bool(args[0].scheduled_new_reqs)
                self._watches = new == (self._recorder.case == "engine_prefill")
            if not self._watches:
                return method(*args, **kwargs)
            with self._recorder.watching():
                return method(*args, **kwargs)

        return step


def census(llm: Any, contract: Contract | None, *, versions: dict[str, str], timeout: float = 60.0) -> Census:
    """The census of an engine's first worker: a prompt is read with its logprobs, and tokens are decoded from it.

    What the sampler does to choose a token is watched too.
    """
    from vllm import SamplingParams, TokensPrompt

    wanted = contract.cases_of("engine") if contract is not None else CASES
    found = []
    for case in wanted:
        if case not in CASES:
            raise InstallError(
                region="census",
                wanted=f"the cases {', '.join(CASES)}",
                found=case,
                fix="correct the contract",
            )
        params = SamplingParams(
            max_tokens=3,
            temperature=0.7,  # a scaled and random choice: all that the sampler can do to a logit
            logprobs=0,
            prompt_logprobs=0,
            ignore_eos=True,
            detokenize=False,
        )
        llm.collective_rpc("isoexec_census_start", timeout=timeout, args=(case,))
        try:
            llm.generate([TokensPrompt(prompt_token_ids=_PROMPT)], params, use_tqdm=False)
        finally:
            found.append(llm.collective_rpc("isoexec_census_stop", timeout=timeout)[0])
    return Census.of(
        [CensusEntry.from_dict(e) for part in found for e in part["entries"]],
        {part["case"]: part["inside"] for part in found},
        load_allowed(Path(__file__).with_name(require_engine()[0].census)),
        runtime="vllm",
        versions=versions,
        contract=contract.name if contract is not None else None,
    )


def _take(folder: str, path: str | None, dtype: str) -> Census:
    """Start an engine of one rank on a folder and take its census."""
    from vllm import LLM

    from isoexec.adapters.vllm.adapter import VllmAdapter, engine_args

    llm = LLM(
        **engine_args(
            path,
            model=folder,
            dtype=dtype,
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=64,
            max_num_seqs=2,
            **sized_cache(32 << 20),
            enable_prefix_caching=False,
            enable_chunked_prefill=False,
        )
    )
    try:
        return VllmAdapter(llm).census()
    finally:
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(_take)
