# SPDX-License-Identifier: Apache-2.0
"""Scenarios in which something is planted in, or exchanged behind, the adapter of a running engine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

from engine_common import (  # type: ignore[import-not-found]
    arguments,
    attribute,
    census,
    prompts,
    reports,
    sample,
    start,
    stop,
    worker_of,
)


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
