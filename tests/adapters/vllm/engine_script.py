# SPDX-License-Identifier: Apache-2.0
"""Scenarios with the real engine, each in a process of its own; ``main`` says how they are asked for."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType, SimpleNamespace
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


def contract_bits(contract: str, first: str, second: str, dtype: str) -> dict[str, Any]:
    """One process, one rank: every way this engine comes to a logprob, and a weight sync."""
    found: dict[str, Any] = {}
    asked = prompts()
    llm, rollout = start(contract, first, dtype)
    sample(llm, rollout, asked[:1])
    begin = time.perf_counter()
    whole, _ = sample(llm, rollout, asked)
    found["seconds"] = time.perf_counter() - begin
    found["tokens"], found["decode"] = tokens(whole), bits(whole)
    found["prefill"] = bits(rollout.rescore(whole, step=0))
    found["reports"] = reports(rollout)
    found["weights"] = rollout.weights(step=0)
    found["census"] = census(llm)
    found["synced_weights"] = rollout.sync(Path(second) / "model.safetensors", 1, step=1)
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
    return {
        "cold_tokens": tokens(cold),
        "cold": bits(cold),
        "warm_tokens": tokens(warm),
        "warm": bits(warm),
        "missed": missed,
        "hits": hits,
    }


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


def around(method: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    """A method that changes what another returns, or the first of it."""

    def changed(*args: Any, **options: Any) -> Any:
        out = method(*args, **options)
        return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

    return changed


def planted(contract: str, first: str) -> dict[str, Any]:
    """The census of one engine, again with each of several things planted in it, and at the end as it was."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm

    llm, _ = start(contract, first, "bfloat16")
    layers = worker_of(llm).get_model().model.layers
    norm, linear, head = (
        layers[1].input_layernorm,
        layers[1].mlp.gate_up_proj,
        worker_of(llm).get_model().lm_head,
    )
    native = SimpleNamespace(apply=lambda layer, x, _bias: torch.nn.functional.linear(x, layer.weight))
    last, act = layers[2].post_attention_layernorm, layers[0].mlp.act_fn
    sampler = worker_of(llm).model_runner.sampler

    def attend(x: Any) -> Any:
        scaled_dot_product_attention(*[x.view(1, 1, *x.shape)] * 3)
        return x

    plants: dict[str, Any] = {
        "a scaled output": attribute(
            norm, "_forward_method", around(norm._forward_method, lambda x: x * 1.0000001)
        ),
        "an in-place sum": attribute(linear, "forward", around(linear.forward, lambda x: x.add_(1e-8))),
        "a native norm": attribute(last, "_forward_method", MethodType(RMSNorm.forward_native, last)),
        "a native activation": attribute(act, "_forward_method", SiluAndMul.forward_native),
        "a native linear": attribute(linear, "quant_method", native),
        "fused attention": attribute(
            layers[0].self_attn.q_norm, "forward", around(layers[0].self_attn.q_norm.forward, attend)
        ),
        "a cast of the logits": attribute(
            head.quant_method, "apply", around(head.quant_method.apply, lambda x: x.bfloat16().float())
        ),
        "arithmetic on logprobs": attribute(
            sampler, "compute_logprobs", around(sampler.compute_logprobs, lambda x: x + 0.0)
        ),
    }
    found: dict[str, Any] = {}
    for name, plant in plants.items():
        with plant:
            found[name] = census(llm)
    found["nothing"] = census(llm)
    stop(llm)
    return found


@contextlib.contextmanager
def kind(module: Any, cls: type) -> Iterator[None]:
    """Give an object another class for the length of a block."""
    before, module.__class__ = type(module), cls
    yield
    module.__class__ = before


@contextlib.contextmanager
def of_class(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give a class or module another attribute for the length of a block."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    yield
    setattr(owner, name, before)


@contextlib.contextmanager
def child(owner: Any, name: str, module: Any) -> Iterator[None]:
    """Put another module into the place of one for the length of a block."""
    before = getattr(owner, name)
    setattr(owner, name, module)
    yield
    setattr(owner, name, before)


@contextlib.contextmanager
def switched(set_it: Callable[[], Any], back: Callable[[], Any]) -> Iterator[None]:
    set_it()
    yield
    back()


@contextlib.contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    yield
    if before is None:
        del os.environ[name]
    else:
        os.environ[name] = before


@contextlib.contextmanager
def hooked(module: Any, hook: Callable[..., Any]) -> Iterator[None]:
    handle = module.register_forward_hook(hook)
    yield
    handle.remove()


def tampers(llm: Any) -> dict[str, Any]:
    """What is done behind the adapter's back: name -> context in which it is."""
    import torch
    from vllm.model_executor.layers.linear import RowParallelLinear

    from isoexec.adapters.vllm import cpu, state
    from isoexec.adapters.vllm.cpu import IsoExecRMSNorm, IsoExecSiluAndMul
    from isoexec.kernels.linear import naive
    from isoexec.kernels.rope import ops as rope_ops

    runner = worker_of(llm).model_runner
    model = runner.get_model()
    layers = model.model.layers
    norm, rope = layers[1].input_layernorm, layers[0].self_attn.rotary_emb

    class Faithful(IsoExecRMSNorm):
        """Gives every bit of its base, for now."""

    def longer(_module: Any, _args: Any, out: Any) -> Any:
        return (out[0] * 1.01, out[1]) if out[0].shape[0] > 40 else None

    @contextlib.contextmanager
    def anew() -> Iterator[None]:
        library = torch.library.Library("isoexec", "IMPL")
        names = torch._C._dispatch_get_all_op_names()
        name = next(n for n in names if n.startswith("isoexec::silu"))
        library.impl(name, lambda gate, up: gate * up, "CPU", allow_override=True)
        yield
        library._destroy()

    @contextlib.contextmanager
    def table() -> Iterator[None]:
        cosines = rope_ops._table(int(rope.head_size), float(rope.base))[0]
        with torch.inference_mode():
            before = cosines[3000, 0].clone()
            cosines[3000, 0] += 2**-20
        yield
        with torch.inference_mode():
            cosines[3000, 0] = before

    @contextlib.contextmanager
    def shared_constant() -> Iterator[None]:
        """In place, in the one mapping that plan and objects share: the specification itself would follow it."""
        bound: Any = state.required("attention").binding("attention")
        constants = bound.constants
        constants["kv_segment"] = 64
        impl = [layer.self_attn.attn.impl for layer in layers]
        for one in impl:
            one._kv_segment = 64
        yield
        constants["kv_segment"] = 32
        for one in impl:
            one._kv_segment = 32

    return {
        "a kernel rebound where it is used": of_class(cpu, "silu_mul", lambda gate, up: gate * up),
        "an operator registered anew": anew(),
        "a method of one object": attribute(
            norm, "_forward_method", around(norm._forward_method, lambda x: x * 1.01)
        ),
        "a method of one object, with its bits": attribute(norm, "forward", norm.forward),
        "a method of the class": of_class(IsoExecSiluAndMul, "forward_native", lambda _self, x: x),
        "a forward hook": hooked(layers[2].self_attn.o_proj, longer),
        "the class of one module": kind(layers[2].mlp.down_proj, RowParallelLinear),
        "a subclass with the same bits": kind(layers[1].post_attention_layernorm, Faithful),
        "one submodule of one layer": child(layers[0].mlp, "act_fn", torch.nn.SiLU()),
        "the epsilon of one norm": attribute(norm, "variance_epsilon", 1e-5),
        "the base of the rotation": attribute(rope, "base", 5e5),
        "the table of the rotation": table(),
        "the segment of one attention": attribute(layers[1].self_attn.attn.impl, "_kv_segment", 64),
        "the segment of everything": shared_constant(),
        "the scale of one attention": attribute(layers[1].self_attn.attn.impl, "scale", 0.1),
        "the block of one linear": attribute(layers[1].mlp.gate_up_proj.isoexec_packed, "k_block", 32),
        "the leaves of the logprobs": attribute(runner.sampler, "_leaves", 4),
        "a constant of the kernel": of_class(naive, "ROW_TILE", 8),
        "the scale of the logits": attribute(model.logits_processor, "scale", 2.0),
        "the model's own code": of_class(
            type(layers[0]), "forward", around(type(layers[0]).forward, lambda x: x)
        ),
        "the runner's method": attribute(runner, "_sample", around(runner._sample, lambda x: x)),
        "float32_matmul_precision": switched(
            lambda: torch.set_float32_matmul_precision("medium"),
            lambda: torch.set_float32_matmul_precision("highest"),
        ),
        "flush_denormal": switched(
            lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False)
        ),
        "the number of threads": switched(
            lambda: torch._C.set_num_threads(2), lambda: torch._C.set_num_threads(1)
        ),
        "oneDNN": switched(
            lambda: torch._C._set_mkldnn_enabled(False), lambda: torch._C._set_mkldnn_enabled(True)
        ),
        "deterministic algorithms": switched(
            lambda: torch.use_deterministic_algorithms(True),
            lambda: torch.use_deterministic_algorithms(False),
        ),
        "a variable": variable("OMP_NUM_THREADS", "2"),
        "a variable that was not set": variable("ONEDNN_MAX_CPU_ISA", "AVX2"),
    }


def truth(contract: str, first: str, second: str) -> dict[str, Any]:
    """One running engine: what its report says while each thing is exchanged, and while nothing is."""
    llm, rollout = start(contract, first, "bfloat16")
    sample(llm, rollout, prompts()[:4])
    before = reports(rollout)[0]["problems"]
    rollout.sync(Path(second) / "model.safetensors", 1, step=1)
    sample(llm, rollout, prompts()[:4])
    begin = time.perf_counter()
    synced = reports(rollout)[0]["problems"]
    found: dict[str, Any] = {
        "before": before,
        "synced": synced,
        "seconds": time.perf_counter() - begin,
        "compare": 0.0,
    }
    begin = time.perf_counter()
    worker_of(llm)._isoexec_snapshot.changes()
    found["compare"] = time.perf_counter() - begin
    for name, tamper in tampers(llm).items():
        with tamper:
            (report,) = rollout.attest("periodic", step=1, require=False)
        found[name] = {
            "process": report.changed or "",
            "regions": {r.region: r.problem or "" for r in report.regions if not r.ok},
        }
    found["after"] = reports(rollout)[0]["problems"]
    stop(llm)
    return found


@contextlib.contextmanager
def running_daemon(state: Path) -> Iterator[None]:
    """The real daemon, in a process of its own, on a state directory."""
    import subprocess

    state.mkdir(parents=True)
    settings = state / "settings.yaml"
    settings.write_text("settle_seconds: 0.5\nwindow_seconds: 1.0\n")
    code = "import sys; from isoexec.daemon.cli import run; sys.exit(run())"
    words = ["--state-dir", str(state), "--http", "127.0.0.1:0", "--log", "json", "--config", str(settings)]
    process = subprocess.Popen([sys.executable, "-P", "-c", code, *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("isoexec daemon:")
    yield
    process.terminate()
    process.wait(15)


def periodic(contract: str, first: str, state: str) -> dict[str, Any]:
    """A watched rollout in which one layer gets a hook between two syncs: what is raised here, and what the daemon wrote."""
    from vllm import LLM

    from isoexec.adapters.vllm.adapter import engine_args
    from isoexec.adapters.vllm.rollout import Rollout
    from isoexec.contracts.halting import HaltMarker, StateDirectory
    from isoexec.probes.client import connect

    os.environ |= {"ISOEXEC_RUN": "periodic", "ISOEXEC_STATE_DIR": state, "ISOEXEC_VERIFY_SECONDS": "0.2"}
    found: dict[str, Any] = {"steps": 0, "raised": "nothing"}
    llm = LLM(**engine_args(contract, **arguments(first, "bfloat16")))
    with running_daemon(Path(state)):
        client = connect("engine")
        rollout = Rollout(llm, client)
        until = time.monotonic() + 2.0
        while time.monotonic() < until or found["steps"] < 2:
            sample(llm, rollout, prompts()[:1])
            found["steps"] += 1
        found["marker_before"] = str(HaltMarker.read(StateDirectory(Path(state)).run("periodic").path))
        module = worker_of(llm).get_model().model.layers[1].mlp.gate_up_proj
        module.register_forward_hook(
            lambda _m, _a, out: (out[0] * 1.01, None) if out[0].shape[0] > 40 else None
        )
        swapped = time.monotonic()
        while time.monotonic() < swapped + 20 and found["raised"] == "nothing":
            try:
                sample(llm, rollout, prompts()[:1])
            except Exception as error:  # noqa: BLE001  (whatever it is, is the finding)
                found["raised"] = f"{type(error).__name__}: {error}"
        found["seconds"] = time.monotonic() - swapped
        marker = None
        while marker is None and time.monotonic() < swapped + 30:
            marker = HaltMarker.read(StateDirectory(Path(state)).run("periodic").path)
            time.sleep(0.05)
        found["rule"] = marker.rule if marker is not None else "no halt"
        found["evidence"] = json.dumps(dict(marker.evidence)) if marker is not None else ""
        client.close()
    stop(llm)
    return found


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


def mimo(contract: str, first: str, dtype: str, tp: int = 1) -> dict[str, Any]:
    """A model with a bias on query, key and value: its ways to a logprob, then the bias lost in the live engine."""
    code = {"trust_remote_code": True, "tensor_parallel_size": tp}
    asked = prompts()[:16]
    llm, rollout = start(contract, first, dtype, **code)
    whole, _ = sample(llm, rollout, asked)
    found: dict[str, Any] = {"tokens": tokens(whole), "decode": bits(whole)}
    found["prefill"] = bits(rollout.rescore(whole, step=0))
    found["reports"] = reports(rollout)
    found["weights"] = rollout.weights(step=0)
    if tp == 1:
        found["census"] = census(llm)
        found["calls"] = llm.collective_rpc("isoexec_report", timeout=60)[0]["calls"]
        found |= lost_bias(llm, rollout, whole)
    stop(llm)
    if tp == 1:
        chunks = {"enable_chunked_prefill": True, "max_num_seqs": 16, "max_num_batched_tokens": 48}
        llm, rollout = start(
            contract, first, dtype, enable_prefix_caching=True, block_size=32, **chunks, **code
        )
        found["chunked"] = bits(rollout.rescore(whole, step=0))
        found |= prefix_hits(llm, rollout, prompts(head=96)[:2])
        stop(llm)
    return found


def lost_bias(llm: Any, rollout: Any, whole: Any) -> dict[str, Any]:
    """The bias of one layer gone in three ways, each undone: what the report, the digests and the bits say."""
    layer = llm.llm_engine.model_executor.driver_worker.worker.get_model().model.layers[1].self_attn.qkv_proj
    method, bias = layer.quant_method, layer.bias
    found: dict[str, Any] = {}
    apply = method.apply
    method.apply = lambda layer, x, _bias=None: apply(layer, x)
    found["dropped_report"] = reports(rollout)[0]["problems"]
    found["dropped"] = bits(rollout.rescore(whole, step=0))
    del method.apply
    layer.bias = None
    found["absent_report"] = reports(rollout)[0]["problems"]
    layer.bias = bias
    kept = bias.data.clone()
    bias.data.zero_()
    found["zeroed"] = bits(rollout.rescore(whole, step=0))
    found["zeroed_weights"] = rollout.weights(step=0)
    bias.data.copy_(kept)
    found["again"] = bits(rollout.rescore(whole, step=0))
    return found


def native_bias(first: str) -> dict[str, Any]:
    """Digests of what can be read of a native MiMo."""
    llm, _ = start(None, first, "bfloat16", trust_remote_code=True)
    found = llm.collective_rpc("isoexec_weight_partials", timeout=60)[0]["tensors"]
    stop(llm)
    return {"weights": found}


def bias_alone(contract: str, first: str) -> dict[str, Any]:
    """MiMo with the contract's bias on the engine's own packed linears."""
    os.environ["ISOEXEC_ENFORCE"] = "column_linear=off"
    llm, rollout = start(contract, first, "bfloat16", trust_remote_code=True)
    got, _ = sample(llm, rollout, prompts()[:4])
    found = {"report": reports(rollout)[0], "decode": bits(got)}
    stop(llm)
    return found


def misfits(
    mimo: str, qwen3: str, mimo_contract: str, qwen3_contract: str, short_contract: str
) -> dict[str, str]:
    """Each of two models under the other's contract and one that lacks a region, and MiMo's class of the engine's own."""
    from vllm import LLM, ModelRegistry
    from vllm.model_executor.models.mimo import MiMoForCausalLM
    from vllm.plugins import load_general_plugins

    from isoexec.adapters.vllm.adapter import engine_args
    from isoexec.adapters.vllm.rollout import Rollout

    def build(contract: str, model: str, native: bool, **more: Any) -> str:
        asked = engine_args(contract, **arguments(model, "bfloat16", trust_remote_code=True, **more))
        if native:
            load_general_plugins()
            ModelRegistry.register_model("MiMoForCausalLM", MiMoForCausalLM)
        Rollout(LLM(**asked))
        return "started"

    biased = {"hf_overrides": {"attention_bias": True}}
    cases: dict[str, tuple[Any, ...]] = {
        "mimo_under_qwen3": (qwen3_contract, mimo, False),
        "qwen3_under_mimo": (mimo_contract, qwen3, False),
        "native_class": (mimo_contract, mimo, True),
        "short": (short_contract, qwen3, False),
    }
    found = {name: _in_child(functools.partial(build, *case)) for name, case in cases.items()}
    found["biased_qwen3"] = _in_child(functools.partial(build, qwen3_contract, qwen3, False, **biased))
    return found


def swap_one_layer_of_rank_one(worker: Any) -> None:
    """In a worker: rank 1 loses the contract's hand-off in one layer, while rank 0 keeps it."""
    from vllm.model_executor.layers.linear import RowParallelLinear

    if worker.rank == 1:
        worker.get_model().model.layers[2].mlp.down_proj.__class__ = RowParallelLinear


def native(first: str, second: str) -> dict[str, Any]:
    """No contract: the engine as it is, only monitored."""
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
            rollout.sync(Path(second) / "model.safetensors", 1, step=1)
            here["synced"] = bits(sample(llm, rollout, prompts())[0])
            stop(llm)
            llm, rollout = start(None, second, dtype)
            here["fresh"] = bits(sample(llm, rollout, prompts())[0])
        stop(llm)
    return found


def _in_child(action: Callable[[], str]) -> str:
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
    found = {case.__name__: _in_child(functools.partial(build, case)) for case in cases}
    found["no_engine"] = _in_child(no_engine)
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


def answer(scenario: str, out: str, errors: str, said: dict[str, Any]) -> str:
    """Run one scenario in this process, its output in files."""
    with Path(errors).open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if said.get("tp", 1) > 1:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # to damage a worker by a function of this file
    found = globals()[scenario](**said)
    Path(out).write_text(json.dumps(found))
    return "done"


def main() -> None:
    """Serve requests, one line of JSON each, every one in a fork of its own: the engine is imported once."""
    warm()
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(_in_child(functools.partial(answer, **asked))), flush=True)


if __name__ == "__main__":
    main()
