# SPDX-License-Identifier: Apache-2.0
"""What the scenarios with the real engine share: prompts, arguments, starting, sampling, looking."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

PROMPTS = 64
ALONE = 5
TOKENS = 16
VOCABULARY = 512


def bits(sequences: Any) -> list[list[int]]:
    """Logprobs of each sequence as the int32 of their float32."""
    return [s.logprobs.view(np.int32).tolist() for s in sequences]


def tokens(sequences: Any) -> list[list[int]]:
    return [list(s.response) for s in sequences]


def prompts(head: int = 0) -> list[list[int]]:
    """Token ids, the same in every process; ``head`` tokens in front are common to all."""
    generator = np.random.default_rng(42)
    common = generator.integers(3, VOCABULARY, head).tolist()
    return [
        [1, *common, *generator.integers(3, VOCABULARY, 15 + 7 * i % 80).tolist()] for i in range(PROMPTS)
    ]


def arguments(model: str, dtype: str, **more: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "max_model_len": 512,
        "max_num_seqs": PROMPTS,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": 32 << 20,
        "seed": 0,
        "max_logprobs": VOCABULARY,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
    }
    return plain | more


def start(contract: str | None, model: str, dtype: str, **more: Any) -> tuple[Any, Any]:
    """An engine and its rollout."""
    from vllm import LLM

    from isoexec.adapters.vllm.adapter import engine_args
    from isoexec.adapters.vllm.rollout import Rollout

    llm = LLM(**engine_args(contract, **arguments(model, dtype, **more)))
    return llm, Rollout(llm)


def stop(llm: Any) -> None:
    llm.llm_engine.engine_core.shutdown()


def sample(
    llm: Any, rollout: Any, asked: list[list[int]], *, seeded: bool = True, temperature: float = 1.0
) -> Any:
    """Sampled sequences with their logprobs, and how many prompt tokens came from the cache."""
    from vllm import SamplingParams, TokensPrompt

    params = [
        SamplingParams(
            temperature=temperature,
            seed=100 + i if seeded else None,
            max_tokens=TOKENS,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
        )
        for i in range(len(asked))
    ]
    outputs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in asked], params, use_tqdm=False)
    cached = sum(o.num_cached_tokens or 0 for o in outputs)
    return rollout.record(outputs, step=0, temperature=temperature), cached


def reports(rollout: Any) -> list[dict[str, Any]]:
    return [
        {
            "rank": r.rank,
            "world": r.world,
            "topology": dict(r.topology),
            "regions": {x.region: x.to_dict() for x in r.regions},
            "problems": list(r.problems()),
        }
        for r in rollout.attest("periodic", step=0, require=False)
    ]


def census(llm: Any) -> dict[str, Any]:
    from isoexec.adapters.vllm.adapter import VllmAdapter

    return VllmAdapter(llm).census().to_dict()


def worker_of(llm: Any) -> Any:
    """The worker of an engine whose worker is in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker


@contextlib.contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an object's own attribute another value for the length of a block."""
    missing = object()
    before = vars(owner).get(name, missing)
    owner.__dict__[name] = value
    yield
    if before is missing:
        del owner.__dict__[name]
    else:
        owner.__dict__[name] = before


def in_child(action: Callable[[], str]) -> str:
    """Run ``action`` in a fork of this process, which has imported the engine and loaded no plugin yet."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            said = action()
        except BaseException as error:  # noqa: BLE001  (whatever the engine raises is the finding)
            said = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        with os.fdopen(writer, "w") as out:
            out.write(said)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said


def prefix_hits(llm: Any, rollout: Any, asked: list[list[int]]) -> dict[str, Any]:
    """Each prompt read whole, and again with its head in the cache; greedy, for the engine cannot seed chunked requests."""
    cold, warm, hits, missed = [], [], [], []
    for prompt in asked:
        rollout.reset_cache()
        one, cached = sample(llm, rollout, [prompt], seeded=False, temperature=0.0)
        cold += one
        missed.append(cached)
    for prompt in asked:
        one, cached = sample(llm, rollout, [prompt], seeded=False, temperature=0.0)
        warm += one
        hits.append(cached)
    assert [s.prefix_hit for s in (*cold, *warm)] == [*missed, *hits]  # what is sent with each sequence
    return {
        "cold_tokens": tokens(cold),
        "cold": bits(cold),
        "warm_tokens": tokens(warm),
        "warm": bits(warm),
        "missed": missed,
        "hits": hits,
    }
