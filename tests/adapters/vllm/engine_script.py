# SPDX-License-Identifier: Apache-2.0
"""Scenarios with the real engine, each in a process of its own; ``main`` says how they are asked for."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from engine_common import (  # type: ignore[import-not-found]
    ALONE,
    arguments,
    attribute,
    bits,
    census,
    in_child,
    prefix_hits,
    prompts,
    reports,
    sample,
    start,
    stop,
    tokens,
)
from engine_mimo import bias_alone, mimo, misfits, native_bias  # type: ignore[import-not-found]
from engine_moe import moe, native_moe, refusals  # type: ignore[import-not-found]
from engine_tampers import of_class, periodic, planted, truth  # type: ignore[import-not-found]


def contract_bits(contract: str, first: str, second: str, dtype: str) -> dict[str, Any]:
    """One process, one rank: every way this engine comes to a logprob, and a weight sync by handles."""
    from safetensors.torch import load_file

    from isoexec.adapters.handles import Offer
    from isoexec.adapters.vllm.transfer import receiving

    found: dict[str, Any] = {}
    asked = prompts()
    llm, rollout = start(contract, first, dtype, **receiving())
    sample(llm, rollout, asked[:1])
    begin = time.perf_counter()
    whole, _ = sample(llm, rollout, asked)
    found["seconds"] = time.perf_counter() - begin
    found["tokens"], found["decode"] = tokens(whole), bits(whole)
    found["prefill"] = bits(rollout.rescore(whole, step=0))
    found["reports"] = reports(rollout)
    found["weights"] = rollout.weights(step=0)
    found["census"] = census(llm)
    offer = Offer(load_file(Path(second) / "model.safetensors"))
    found["synced_weights"] = rollout.sync(offer.handles, 1, step=1)
    offer.withdraw()
    found["synced_version"] = llm.collective_rpc("isoexec_weight_partials", timeout=60)[0]["weight_version"]
    after, _ = sample(llm, rollout, asked)
    found["synced_tokens"], found["synced"] = tokens(after), bits(after)
    found["calls"] = llm.collective_rpc("isoexec_report", timeout=60)[0]["calls"]
    found["written_in_place"] = bits(write_in_place(llm, rollout, asked, first))
    found["unseen_write"] = unseen_write(llm, rollout)
    stop(llm)

    llm, rollout = start(contract, second, dtype, max_num_seqs=1)
    alone, _ = sample(llm, rollout, asked[:ALONE])
    found["alone_tokens"], found["alone"] = tokens(alone), bits(alone)
    stop(llm)

    chunks = {"enable_chunked_prefill": True, "max_num_seqs": 16, "max_num_batched_tokens": 48}
    llm, rollout = start(contract, first, dtype, enable_prefix_caching=True, block_size=32, **chunks)
    found["chunked"] = bits(rollout.rescore(whole, step=0))
    found |= prefix_hits(llm, rollout, prompts(head=96)[:3])
    found["flushes"] = flushes(llm, rollout)
    stop(llm)

    if dtype == "bfloat16":
        llm, rollout = start(contract, first, dtype, logprobs_mode="processed_logprobs")
        plain, _ = sample(llm, rollout, asked)
        found["processed_at_one_tokens"], found["processed_at_one"] = tokens(plain), bits(plain)
        hot, _ = sample(llm, rollout, asked[:2], temperature=0.5)
        found["processed_sums"] = probability_sums(llm, asked[:2])
        found["processed"], found["processed_prefill"] = bits(hot), bits(rollout.rescore(hot, step=0))
        found["processed_report"] = reports(rollout)[0]["regions"]["logprobs"]
        stop(llm)
    return found


def flushes(llm: Any, rollout: Any) -> dict[str, str]:
    """What is said of a reset that empties the cache, of one that only says so, of a cache that shows no hit, and again."""
    from isoexec.adapters.vllm.prefix import PrefixProbe
    from isoexec.contracts.errors import InstallError

    def said() -> str:
        try:
            rollout.reset_cache()
        except InstallError as error:
            return error.found
        return "empty"

    found = {"reset": said()}
    with attribute(llm, "reset_prefix_cache", lambda: True):
        found["only said"] = said()
    found["attested"] = str(rollout._cache_problem)
    with of_class(PrefixProbe, "hits", lambda _probe: 0):
        found["blind"] = said()
    found["again"] = said()
    found["then attested"] = str(rollout._cache_problem)
    return found


def probability_sums(llm: Any, asked: list[list[int]]) -> list[float]:
    """Sum of probabilities over the vocabulary of the first sampled position, at temperature 0.5."""
    from vllm import SamplingParams, TokensPrompt

    params = SamplingParams(temperature=0.5, max_tokens=1, logprobs=-1, ignore_eos=True, detokenize=False)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in asked], params, use_tqdm=False)
    return [float(sum(np.exp(e.logprob) for e in o.outputs[0].logprobs[0].values())) for o in outputs]


def write_in_place(llm: Any, rollout: Any, asked: list[list[int]], path: str) -> Any:
    """Load a checkpoint by the model's own ``load_weights``, as frameworks do, past every reload call of the engine."""
    from safetensors.torch import load_file

    model = llm.llm_engine.model_executor.driver_worker.worker.get_model()
    model.load_weights(iter(load_file(Path(path) / "model.safetensors").items()))
    return sample(llm, rollout, asked)[0]


def unseen_write(llm: Any, rollout: Any) -> list[str]:
    """What the report says after a write that no loader and no version counter sees."""
    model = llm.llm_engine.model_executor.driver_worker.worker.get_model()
    model.model.layers[1].mlp.down_proj.weight.data[0, 0] += 1
    return reports(rollout)[0]["problems"]


def contract_ranks(contract: str, first: str, second: str, tp: int) -> dict[str, Any]:
    """Several ranks in processes of their own, both dtypes."""
    found: dict[str, Any] = {}
    for dtype in ("bfloat16", "float32"):
        llm, rollout = start(contract, first, dtype, tensor_parallel_size=tp)
        begin = time.perf_counter()
        got, _ = sample(llm, rollout, prompts())
        here: dict[str, Any] = {"seconds": time.perf_counter() - begin}
        here["tokens"], here["decode"] = tokens(got), bits(got)
        here["prefill"] = bits(rollout.rescore(got, step=0))
        here["reports"] = reports(rollout)
        here["weights"] = rollout.weights(step=0)
        if dtype == "bfloat16":
            here["synced_weights"] = rollout.sync(Path(second) / "model.safetensors", 1, step=1)
            after, _ = sample(llm, rollout, prompts())
            here["synced"] = bits(after)
        else:
            llm.collective_rpc(swap_one_layer_of_rank_one, timeout=60)
            here["swapped"] = reports(rollout)
        found[dtype] = here
        stop(llm)
    return found


def swap_one_layer_of_rank_one(worker: Any) -> None:
    """In a worker: rank 1 loses the contract's hand-off in one layer, while rank 0 keeps it."""
    from vllm.model_executor.layers.linear import RowParallelLinear

    if worker.rank == 1:
        worker.get_model().model.layers[2].mlp.down_proj.__class__ = RowParallelLinear


def emptied(worker: Any) -> list[str]:
    """In a worker: the linears whose weight the engine has put where nobody can read it, by their last names."""
    modules = worker.get_model().named_modules()
    weights = ((name, getattr(module, "weight", None)) for name, module in modules)
    return sorted({name.split(".")[-1] for name, w in weights if w is not None and w.numel() == 0})


def native(first: str, second: str) -> dict[str, Any]:
    """No contract: the engine as it is, only monitored."""
    from isoexec.contracts.errors import InstallError

    found: dict[str, Any] = {}
    for dtype in ("bfloat16", "float32"):
        llm, rollout = start(None, first, dtype)
        sample(llm, rollout, prompts()[:1])
        begin = time.perf_counter()
        got, _ = sample(llm, rollout, prompts())
        here: dict[str, Any] = {"seconds": time.perf_counter() - begin}
        here["tokens"], here["decode"] = tokens(got), bits(got)
        found[dtype] = here
        if dtype == "bfloat16":
            here["reports"] = reports(rollout)
            here["census"] = census(llm)
            parts = llm.collective_rpc("isoexec_weight_partials", timeout=60)[0]
            here["unknown"], here["readable"] = parts["unknown"], sorted(parts["tensors"])
            here["emptied"] = llm.collective_rpc(emptied, timeout=60)[0]
            try:
                rollout.sync([], 1, step=1)
            except InstallError as error:
                here["handles"] = str(error)
            rollout.sync(Path(second) / "model.safetensors", 1, step=1)
            here["synced"] = bits(sample(llm, rollout, prompts())[0])
            stop(llm)
            llm, rollout = start(None, second, dtype)
            here["fresh"] = bits(sample(llm, rollout, prompts())[0])
        stop(llm)
    return found


def closed(contract: str, first: str, broken: str) -> dict[str, str]:
    """Ways to lose the installation between the driver's intention and the engine; each must end in a refusal."""
    from vllm import LLM

    from isoexec.adapters.vllm.adapter import VllmAdapter, engine_args
    from isoexec.adapters.vllm.rollout import Rollout

    def build(change: Callable[[dict[str, Any]], None]) -> str:
        asked = engine_args(contract, **arguments(first, "bfloat16"))
        change(asked)
        Rollout(LLM(**asked))
        return "sampled"

    def no_plugin(_: dict[str, Any]) -> None:
        os.environ["VLLM_PLUGINS"] = "another"

    def broken_plugin(_: dict[str, Any]) -> None:
        sys.path.insert(0, broken)

    def off(_: dict[str, Any]) -> None:
        os.environ["ISOEXEC_ENFORCE"] = "off"

    def unset(_: dict[str, Any]) -> None:
        del os.environ["ISOEXEC_CONTRACT"]

    def half(_: dict[str, Any]) -> None:
        from vllm.model_executor.custom_op import op_registry_oot
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        del op_registry_oot["RMSNorm"]

    def no_quantization_no_worker(asked: dict[str, Any]) -> None:
        """The arguments that fail closed taken out again: the engine starts natively."""
        os.environ["VLLM_PLUGINS"] = "another"
        for name in ("quantization", "worker_cls"):
            del asked[name]
        asked["worker_extension_cls"] = "isoexec.adapters.vllm.worker.IsoExecExtension"

    def bare(asked: dict[str, Any]) -> None:
        """Not even the methods that report."""
        no_quantization_no_worker(asked)
        del asked["worker_extension_cls"]

    def compiled(asked: dict[str, Any]) -> None:
        asked["enforce_eager"] = False

    def other_contract(asked: dict[str, Any]) -> None:
        attention = next(
            one
            for one in asked["additional_config"]["isoexec"]["contract"]["composition"]
            if one["region"] == "attention"
        )
        attention["constants"]["kv_segment"] = 64

    def too_long(asked: dict[str, Any]) -> None:
        asked["max_model_len"] = asked["max_num_batched_tokens"] = 16384
        asked["hf_overrides"] = {"max_position_embeddings": 16384}

    def no_engine() -> str:
        VllmAdapter().verify()
        return "verified"

    cases = (
        no_plugin,
        broken_plugin,
        off,
        unset,
        half,
        no_quantization_no_worker,
        bare,
        compiled,
        other_contract,
        too_long,
    )
    found = {case.__name__: in_child(functools.partial(build, case)) for case in cases}
    found["no_engine"] = in_child(no_engine)
    return found


def partial(contract: str, first: str) -> dict[str, Any]:
    """Two regions left to the engine, one of them looked at."""
    os.environ["ISOEXEC_ENFORCE"] = "norm=observe,rope=off"
    llm, rollout = start(contract, first, "bfloat16")
    got, _ = sample(llm, rollout, prompts()[:2])
    return {"report": reports(rollout)[0], "sampled": sum(map(len, bits(got)))}


def edited(contract: str, first: str) -> dict[str, Any]:
    """A contract file edited between two syncs, a worker that holds another contract, and the file gone."""
    from isoexec.adapters.vllm.rollout import Rollout
    from isoexec.contracts import wire
    from isoexec.contracts.errors import IsoExecError
    from isoexec.contracts.schema import Contract
    from isoexec.probes.client import Client, ProbeSettings

    path = Path("edited.yaml")
    text = Path(contract).read_text()
    path.write_text(text)
    llm, _ = start(str(path), first, "bfloat16")
    client = Client(ProbeSettings.from_env(), "engine")  # what it would send stays in its queue
    rollout = Rollout(llm, client)

    def sync() -> dict[str, Any]:
        try:
            rollout.attest("sync", step=1)
            said = "agreed"
        except IsoExecError as error:
            said = f"{type(error).__name__}: {error}"
        sent = [one for one in client._queue if isinstance(one, wire.Attestation)][-1]
        return {"said": said, "identities": sent.identities, "contract": sent.contract}

    found: dict[str, Any] = {"stands": sync()}
    assert "kv_segment: 32" in text
    path.write_text(text.replace("kv_segment: 32", "kv_segment: 64"))
    found["file"] = sync()
    found["policy"] = Contract.load(path).numerical_policy
    rollout.contract = Contract.load(path)
    found["worker"] = sync()
    rollout.contract = Contract.load(contract)
    path.unlink()
    found["gone"] = sync()
    return found


def removed(contract: str) -> dict[str, Any]:
    """What vLLM's registries hold before, with and after the hooks; installed twice, as the engine calls plugins."""
    from isoexec.adapters.vllm import cpu, plugin
    from isoexec.adapters.vllm.adapter import VllmAdapter

    os.environ["ISOEXEC_CONTRACT"] = contract
    before = cpu.registered()
    plugin.register()
    plugin.register()
    there = cpu.registered()
    VllmAdapter().remove()
    return {"before": before, "there": there, "after": cpu.registered()}


def warm() -> None:
    """Import what every scenario needs; none of it registers anything with the engine."""
    from vllm import LLM  # noqa: F401

    import isoexec.adapters.vllm.cpu_attention
    import isoexec.adapters.vllm.cpu_worker  # noqa: F401


SCENARIOS: dict[str, Callable[..., dict[str, Any]]] = {
    scenario.__name__: scenario
    for scenario in (
        contract_bits,
        contract_ranks,
        native,
        closed,
        partial,
        edited,
        removed,
        planted,
        truth,
        periodic,
        mimo,
        native_bias,
        bias_alone,
        misfits,
        moe,
        native_moe,
        refusals,
    )
}


def answer(scenario: str, out: str, errors: str, said: dict[str, Any]) -> str:
    """Run one scenario in this process, its output in files."""
    with Path(errors).open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if said.get("tp", 1) > 1:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # to damage a worker by a function of this file
    found = SCENARIOS[scenario](**said)
    Path(out).write_text(json.dumps(found))
    return "done"


def main() -> None:
    """Serve requests, one line of JSON each, every one in a fork of its own: the engine is imported once."""
    warm()
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(in_child(functools.partial(answer, **asked))), flush=True)


if __name__ == "__main__":
    main()
