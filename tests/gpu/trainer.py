# SPDX-License-Identifier: Apache-2.0
"""Megatron under a contract on a Hopper GPU, looked at from all sides: does it run, are the bits equal, what does it cost.

    python tests/gpu/trainer.py

Each stage prints its result, and a failure is printed and does not end the run. Models have Qwen3-8B's sizes with a few layers
and random weights. TP 2 is two processes on the one GPU, whose exchanges go through host memory (`kernels/gates/staged.py`), so
their time says nothing. It takes a minute, and another where kernels are compiled for the first time.

`--specified` runs the same stages on a CPU at tiny sizes, the kernels being the specifications: it tries this script.
"""

from __future__ import annotations

import argparse
import gc
import json
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from isoexec.adapters import base
from isoexec.adapters.demo.trainer import draw
from isoexec.adapters.megatron import adapter, cpu
from isoexec.adapters.megatron.kinds import kinds_of
from isoexec.adapters.megatron.logprobs import (
    model_inputs,
    output_processor,
    packed_inputs,
    score,
    score_packed,
    sequence_multiple,
)
from isoexec.adapters.megatron.model import build
from isoexec.adapters.megatron.training import Batch, Trainer
from isoexec.adapters.megatron.weights import weight_partials
from isoexec.contracts.errors import InstallError, IsoExecError
from isoexec.contracts.schema import Contract, library
from isoexec.kernels.gates import staged
from isoexec.probes.attest import environment as probed
from isoexec.probes.weights import add_named, add_partials, tensor_partial

QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
TINY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 256,
}
NAME = "shared"  # the backend of ranks on one GPU
CHUNK = 1 << 24  # elements whose digest is taken at once
PATIENCE = 240.0  # seconds for the two ranks

Digests = dict[str, tuple[int, int]]


class _Done:
    """The work of a group of one rank."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Shared(staged.Staged):
    """`staged` with what Megatron's gradient buffers call besides; a group of one rank moves nothing."""

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        if self.size() == 1:
            return staged._Work(_Done(), ())
        for tensor in tensors:
            each = dist.AllreduceOptions()
            each.reduceOp = opts.reduceOp
            self.allreduce([tensor], each).wait()
        return staged._Work(_Done(), ())

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        return staged._Work(_Done(), ()) if self.size() == 1 else super().allreduce(tensors, opts)

    def getBackendName(self) -> str:
        return NAME


class Run:
    """What the options ask for, and the stages' outcomes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.specified: bool = options.specified
        self.folder = Path(options.folder)
        self.contract = Contract.load(library("qwen3-dense-sm90"))
        self.lengths = (23, 9, 17) if self.specified else (611, 64, 1000, 331)
        self.sizes = QWEN3_8B | (TINY if self.specified else {})
        self.failed: list[str] = []
        self.began = time.monotonic()
        if self.specified:
            made = runpy.run_path(str(Path(__file__).parents[1] / "adapters/megatron/specified.py"))
            cpu.install()
            made["install"]()
            self.contract = made["contract"]()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.specified else torch.device("cuda", 0)

    def stage(self, name: str, work: Callable[[], str]) -> None:
        began = time.monotonic()
        try:
            said = work()
            fine = "DIFFERS" not in said
        except Exception:  # noqa: BLE001 - the next stage may run
            said, fine = "FAILED\n" + traceback.format_exc(limit=8), False
        if not fine:
            self.failed.append(name)
        now = time.monotonic()
        print(f"[{now - self.began:6.1f} s] {name}: {said} ({now - began:.1f} s)", flush=True)

    def model(self, layers: int, *, native: bool = False, **options: Any) -> Any:
        where = self.folder / f"layers{layers}"
        where.mkdir(exist_ok=True)
        config = where / "config.json"
        if not config.exists():  # both ranks read what the first process wrote
            config.write_text(json.dumps(self.sizes | {"num_hidden_layers": layers}))
        contract = None if native else self.contract
        made = build(where, contract=contract, load=False, **options)
        draw(made)
        return made

    def sequences(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(7)
        vocab = int(self.sizes["vocab_size"])
        return [torch.randint(3, vocab, (n,), generator=generator).to(self.device) for n in self.lengths]

    def rows(self) -> Tensor:
        most = max(self.lengths)
        return torch.stack([torch.nn.functional.pad(s, (0, most - len(s))) for s in self.sequences()])


def _digest(x: Tensor, whole: Sequence[int], offset: Sequence[int]) -> tuple[int, int]:
    rows = max(1, CHUNK // max(1, x[0].numel()))
    parts = [
        tensor_partial(x[a : a + rows].contiguous(), whole, [offset[0] + a, *offset[1:]])
        for a in range(0, len(x), rows)
    ]
    return add_partials(parts)


def differing(a: Sequence[Tensor], b: Sequence[Tensor]) -> str:
    """How many elements differ as integers, in words."""
    assert [x.shape for x in a] == [x.shape for x in b], "other shapes"
    bits = torch.int32
    wrong = sum(
        int((x.cpu().contiguous().view(bits) != y.cpu().contiguous().view(bits)).sum())
        for x, y in zip(a, b, strict=True)
    )
    count = sum(x.numel() for x in a)
    return f"equal, {count} elements" if not wrong else f"DIFFERS in {wrong} of {count} elements"


def names_differing(a: Digests, b: Digests) -> str:
    wrong = [n for n in sorted({*a, *b}) if a.get(n) != b.get(n)]
    return f"equal, {len(a)} tensors" if not wrong else f"DIFFERS in {len(wrong)}: {', '.join(wrong[:6])}"


def join(folder: Path, rank: int, size: int, device: torch.device) -> None:
    """Process groups of one or two ranks, and Megatron's of tensor parallelism over all of them."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, Shared, devices=["cpu", "cuda"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = FileStore(str(folder / f"store{size}"), size)
    dist.init_process_group(NAME, store=store, rank=rank, world_size=size)
    parallel_state.initialize_model_parallel(size, 1, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)


def steps(run: Run, model: Any, *, graphs: bool = False) -> dict[str, Any]:
    """Two clipped optimizer steps: gradient norms, logprobs, digests of the masters after each."""
    trainer = Trainer(model, lr=1e-4, clip_grad=0.1, ratio_clip=(1.0, 1e9), microbatch=2, graphs=graphs)
    tokens = run.rows()
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for i, length in enumerate(run.lengths):
        mask[i, 4:length] = True
    old = trainer.score(tokens)
    found: dict[str, Any] = {"norms": [], "logprobs": [], "masters": []}
    for step in range(2):
        advantages = torch.linspace(-1, 1, len(tokens), device=tokens.device) * (step + 1)
        batch = Batch(tokens=tokens, mask=mask, advantages=advantages, old_logprobs=old)
        result = trainer.train_step(batch)
        found["norms"].append(result.grad_norm)
        found["logprobs"].append(result.logprobs.cpu())
        found["masters"].append(weight_partials(model, masters=True).tensors)
    return found


def scores(run: Run, model: Any) -> dict[str, Any]:
    return {
        "rows": score(model, run.rows(), microbatch=2).cpu(),
        "packed": [p.cpu() for p in score_packed(model, run.sequences())],
    }


def gradients(run: Run, model: Any) -> tuple[Tensor, Digests]:
    """Logprobs of a pack, and digests of every parameter's gradient for fixed gradients of them."""
    model.train()
    model.zero_grad(set_to_none=True)
    inputs = packed_inputs(run.sequences(), sequence_multiple(model))
    values = model(**inputs, output_processor=output_processor(model))
    values.backward(torch.linspace(-1, 1, values.numel(), device=values.device).view(values.shape))
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        found[name] = _digest(grad, grad.shape, [0] * grad.dim())
    model.zero_grad(set_to_none=True)
    return values.detach().cpu(), found


def as_rank(run: Run, rank: int, size: int) -> None:
    """One of two ranks: what it has found is written to the folder."""
    join(run.folder, rank, size, run.device)
    environment(run)
    admit(run)
    model = run.model(2, sequence_parallel=True)
    found = scores(run, model) | {"transport": model.isoexec_adapter.describe().modules["row_linear"][0]}
    torch.save(found, run.folder / f"scores{rank}.pt")
    torch.save(steps(run, model), run.folder / f"steps{rank}.pt")
    dist.all_reduce(torch.zeros(1, device=run.device))  # neither leaves while the other still sends


def admit(run: Run) -> str:
    """Plan as shipped; where this machine's evidence or environment is refused, say so and go on without asking for it."""
    if run.specified:
        return "not asked, these are the specifications"
    try:
        base.make_plan(run.contract, "trainer", None, "bfloat16")
    except IsoExecError as error:
        setattr(base, "require_evidence", lambda *_: None)  # noqa: B010
        return f"DIFFERS: UNPROVEN HERE, going on without evidence: {error}"
    return "every region is proven for this machine"


def environment(run: Run) -> str:
    kinds_of("sm90").begin()
    if run.specified:
        return "not asked, these are the specifications"
    refused = run.contract.claims.environment.refusals(probed())
    if refused:
        # the run goes on: what is refused is printed, and the verdict is a failure
        setattr(adapter, "environment", lambda: probed() | _wanted(run))  # noqa: B010
        return "DIFFERS: " + "; ".join(refused)
    return "as the contract claims"


def _wanted(run: Run) -> dict[str, Any]:
    claimed = run.contract.claims.environment
    return {
        **{v.name: next(iter(v.admitted), "any") for v in claimed.versions},
        **{name: str(value) for name, value in claimed.switches.items()},
        "arch": claimed.arch,
    }


def ranks(run: Run) -> Iterator[subprocess.Popen[bytes]]:
    for rank in range(2):
        more = ["--specified"] if run.specified else []
        command = [sys.executable, __file__, "--rank", str(rank), "--folder", str(run.folder), *more]
        with (run.folder / f"log{rank}").open("wb") as log:
            yield subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def both(run: Run) -> str:
    """Start the two ranks and wait for them."""
    processes = list(ranks(run))
    ends = time.monotonic() + PATIENCE
    while any(p.poll() is None for p in processes) and time.monotonic() < ends:
        if any(p.poll() for p in processes):
            ends = min(ends, time.monotonic() + 5.0)
        time.sleep(0.1)
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()
    codes = [p.returncode for p in processes]
    if any(codes):
        tails = [(run.folder / f"log{r}").read_text(errors="replace")[-2500:] for r in range(2)]
        return f"DIFFERS: exit codes {codes}\n" + "\n--\n".join(tails)
    return f"ran; {torch.load(run.folder / 'scores0.pt')['transport']}"


def found(run: Run, what: str) -> list[dict[str, Any]]:
    return [torch.load(run.folder / f"{what}{rank}.pt", weights_only=False) for rank in range(2)]


def timed(call: Callable[[], Any], device: torch.device, times: int = 5) -> float:
    """Median milliseconds of a call."""
    spans = []
    for turn in range(times + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if turn >= 2:  # the first two warm up
            spans.append((time.perf_counter() - began) * 1e3)
    return sorted(spans)[len(spans) // 2]


def cost(run: Run, *, native: bool) -> str:
    """Milliseconds at 8192 tokens with 2 and 4 layers, and so of one layer."""
    b, s = (2, 16) if run.specified else (4, 2048)
    generator = torch.Generator().manual_seed(9)
    tokens = torch.randint(3, int(run.sizes["vocab_size"]), (b, s), generator=generator).to(run.device)
    said = []
    took: dict[str, list[float]] = {}
    for layers in (2, 4):
        model = run.model(layers, native=native)
        process = output_processor(model)

        def rows(model: Any = model, process: Any = process) -> Tensor:
            values: Tensor = model(**model_inputs(tokens), output_processor=process)
            return values

        def pack(model: Any = model, process: Any = process) -> Tensor:
            values: Tensor = model(**packed_inputs(list(tokens)), output_processor=process)
            return values

        for name, call in (("rows", rows),) if native else (("rows", rows), ("pack", pack)):
            model.eval()
            with torch.no_grad():
                took.setdefault(f"{name} forward", []).append(timed(call, run.device))
            model.train()

            def whole(call: Callable[[], Tensor] = call, model: Any = model) -> None:
                model.zero_grad(set_to_none=True)
                call().sum().backward()

            took.setdefault(f"{name} forward+backward", []).append(timed(whole, run.device, times=3))
        del model, process, rows, pack, call, whole
        cleared(run)
    for name, (two, four) in took.items():
        said.append(f"{name} {two:.1f} ms with 2 layers, {(four - two) / 2:.2f} ms a layer")
    return "; ".join(said)


def cleared(run: Run) -> None:
    gc.collect()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()


def whole_run(run: Run) -> int:
    join(run.folder, 0, 1, run.device)
    held: dict[str, Any] = {}

    def made(**options: Any) -> Any:
        held.pop("model", None)
        cleared(run)
        held["model"] = run.model(2, **options)
        return held["model"]

    def built() -> str:
        model = made()
        reports = model.isoexec_adapter.verify()
        wrong = [p for r in reports for p in r.problems()]
        if wrong:
            return "DIFFERS: " + "; ".join(wrong)
        return "regions " + ", ".join(f"{r.region} {'ok' if r.ok else r.problem}" for r in reports[0].regions)

    def scored() -> str:
        held["scores"] = scores(run, held["model"])
        every = torch.cat(held["scores"]["packed"])
        if not bool(every.isfinite().all()):
            return f"DIFFERS: {int((~every.isfinite()).sum())} of {every.numel()} logprobs are not finite"
        return f"{every.numel()} logprobs, mean {float(every.mean()):.3f}"

    def packs() -> str:
        rows = [held["scores"]["rows"][i, :n] for i, n in enumerate(run.lengths)]
        alone = [score(held["model"], s.unsqueeze(0))[0].cpu() for s in run.sequences()]
        return f"to rows {differing(held['scores']['packed'], rows)}; to each alone {differing(held['scores']['packed'], alone)}"

    def plain() -> str:
        held["plain"] = gradients(run, held["model"])
        again = gradients(run, held["model"])
        return f"{differing([held['plain'][0]], [again[0]])}; gradients {names_differing(held['plain'][1], again[1])}"

    def recomputed(**options: Any) -> Callable[[], str]:
        def work() -> str:
            values, grads = gradients(run, made(**options))
            return f"{differing([held['plain'][0]], [values])}; gradients {names_differing(held['plain'][1], grads)}"

        return work

    def stepped() -> str:
        held["steps"] = steps(run, made())
        held.pop("model")
        cleared(run)
        return f"gradient norms {held['steps']['norms']}"

    def replayed() -> str:
        of = steps(run, made(), graphs=True)
        held.pop("model")
        cleared(run)
        return same_as_alone([of])

    def refused() -> str:
        try:
            Trainer(made(), graphs=True)
        except InstallError as error:
            return str(error)
        return "DIFFERS: graphs were not refused on a CPU"

    def same_scores() -> str:
        own, theirs = held["scores"], found(run, "scores")[0]
        rows = differing([own["rows"]], [theirs["rows"]])
        return f"rows {rows}; packed {differing(own['packed'], theirs['packed'])}"

    def same_as_alone(of: list[dict[str, Any]]) -> str:
        """Whether the shares of one or two ranks are the steps of one."""
        said = []
        for step in range(2):
            masters = add_named([o["masters"][step] for o in of])
            own = add_named([held["steps"]["masters"][step]])
            said.append(
                f"step {step + 1}: norm {held['steps']['norms'][step]} and {of[0]['norms'][step]}, "
                f"logprobs {differing([held['steps']['logprobs'][step]], [of[0]['logprobs'][step]])}, "
                f"masters {names_differing(own, masters)}"
            )
        if held["steps"]["norms"] != of[0]["norms"] or any("DIFFERS" in s for s in said):
            return "DIFFERS: " + "; ".join(said)
        return "; ".join(said)

    def same_steps() -> str:
        return same_as_alone(found(run, "steps"))

    def shipped() -> str:
        from isoexec.kernels.linear.hopper import cublaslt

        cublaslt.restore(cublaslt.SHIPPED)
        return cost(run, native=True)

    stages: list[tuple[str, Callable[[], str]]] = [
        ("environment", lambda: environment(run)),
        ("evidence", lambda: admit(run)),
        ("a model of 2 layers, its regions and canaries", built),
        ("logprobs of packed sequences", scored),
        ("packed against rows and one by one", packs),
        ("forward and backward twice", plain),
        ("layers recomputed", recomputed(recompute=True)),
        ("attention recomputed", recomputed(recompute_granularity="selective")),
        ("two optimizer steps at TP 1", stepped),
        ("the same, microbatches as CUDA graphs", refused if run.specified else replayed),
        ("TP 2 with sequence parallelism, two processes on one GPU", lambda: both(run)),
        ("scores of TP 2 against TP 1", same_scores),
        ("steps of TP 2 against TP 1", same_steps),
        ("time at 8192 tokens under the contract", lambda: cost(run, native=False)),
        ("time at 8192 tokens of the native local spec", shipped),
    ]
    for name, work in stages:
        run.stage(name, work)
    print(f"{len(stages) - len(run.failed)} of {len(stages)} stages as wanted", *run.failed, sep="\n  ")
    dist.destroy_process_group()
    return bool(run.failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--specified", action="store_true", help="on a CPU, by the specifications, tiny")
    parser.add_argument("--rank", type=int, help="be one of the two ranks (the script starts them itself)")
    parser.add_argument("--folder", help="where the ranks meet (the script makes one itself)")
    options = parser.parse_args()
    if options.rank is not None:
        as_rank(Run(options), options.rank, 2)
        return 0
    with tempfile.TemporaryDirectory(prefix="isoexec-megatron-") as folder:
        options.folder = folder
        return whole_run(Run(options))


if __name__ == "__main__":
    sys.exit(main())
