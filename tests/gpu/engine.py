# SPDX-License-Identifier: Apache-2.0
"""A contracted vLLM engine on a Hopper GPU, looked at from all sides: a random Qwen3 of real widths, compiled, in CUDA graphs.

`python tests/gpu/engine.py [--seconds 300] [--layers 3] [--eager] [--tied] [--drafts 3]` writes the checkpoint to a temporary
folder, starts the engine as a user would, and prints what each stage found, one JSON line each; a stage that fails says so, and
those that can go on do. The exit status is the number of stages that failed. `$OUT/engine.json` keeps them where OUT is set.
Nothing is fetched. It takes two minutes, of which the engine's start is one and a half.

Stages:

versions, contract    what is installed, and what the plan binds here
checkpoint, engine    the model is made, and loaded, compiled, captured
report                what every region binds, by canary, and whether compiled code has the layers' bits
mixed                 requests of many lengths decode together, in chunks, beside each other's prefill
rescored              their tokens' logprobs as a prompt's, in one pack: the decode's, as integers
alone                 some of them rescored alone, and decoded again alone
long                  one past the first attention segment, by chunks
company               the same tokens rescored in another order and beside others
reload                other weights in place: other logprobs, then the first weights' own again
again                 the report after all of that
replays               that head and logprobs of decode steps were replayed, where the engine captures anything
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_PLUGINS", "isoexec")

import numpy as np

from isoexec.contracts.schema import Contract, library

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 1024, 3072, 16, 8, 128, 151936  # Qwen3-0.6B's
MOST = 8192
LENGTHS = (1, 5, 16, 17, 63, 64, 100, 333, 700, 1500)


class Run:
    """The stages of one run: what each found, and how long there is left."""

    def __init__(self, seconds: float) -> None:
        self.began, self.seconds = time.monotonic(), seconds
        self.found: list[dict[str, Any]] = []
        self.held: dict[str, Any] = {}

    def stage(self, name: str, work: Callable[[], Any]) -> bool:
        """Run one stage; print and keep what it gives or how it failed."""
        began = time.monotonic()
        entry: dict[str, Any] = {"stage": name}
        if began - self.began > self.seconds:
            entry |= {"ok": False, "error": "no time left"}
        else:
            try:
                entry |= {"ok": True, "found": work()}
            except Exception as error:  # noqa: BLE001 - a stage that fails must not end the others
                entry |= {
                    "ok": False,
                    "error": f"{type(error).__name__}: {error}"[:2000],
                    "at": traceback.format_exc().strip().splitlines()[-8:],
                }
        entry["seconds"] = round(time.monotonic() - began, 2)
        self.found.append(entry)
        print(json.dumps(entry, default=str), flush=True)
        if out := os.environ.get("OUT"):
            Path(out, "engine.json").write_text(json.dumps(self.found, indent=1, default=str))
        return bool(entry["ok"])


def versions() -> dict[str, Any]:
    """What is installed, and the device."""
    import torch
    import triton

    from isoexec.adapters.vllm.engines import require_engine
    from isoexec.kernels.attention.hopper import fa3

    engine, found = require_engine()
    return {
        "engine": f"{engine.distribution} {found} on {engine.arch}",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "device": torch.cuda.get_device_name(),
        "fa3": str(fa3.identity()),
    }


def planned(contract: str) -> dict[str, str]:
    """Region -> provider of the plan; raises what the contract refuses on this machine."""
    from isoexec.adapters.vllm.install import plan_engine
    from isoexec.contracts.parts import AXES

    plan = plan_engine(Contract.load(contract), dict.fromkeys(AXES, 1), "bfloat16")
    return {b.region: b.provider for b in plan.bindings}


def make(folder: Path, layers: int, tied: bool, seed: int) -> int:
    """Write a checkpoint; its tensors' elements."""
    import torch

    from isoexec.adapters.demo.tiny import make_qwen3

    if not (folder / "config.json").exists():
        make_qwen3(
            folder,
            seed=seed,
            layers=layers,
            hidden=HIDDEN,
            ffn=FFN,
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            vocab=VOCAB,
            max_positions=MOST,
            dtype=torch.bfloat16,
        )
    if tied:
        from safetensors.torch import load_file, save_file

        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
        (file,) = folder.glob("*.safetensors")
        save_file({k: v for k, v in load_file(file).items() if k != "lm_head.weight"}, file, {"format": "pt"})
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) // 2


def draft(folder: Path) -> Path:
    """Write an EAGLE head of one random layer for the checkpoint's width; its folder."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": MOST,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        "fc": (HIDDEN, 2 * HIDDEN),
        "layers.0.self_attn.q_proj": (queries, HIDDEN),
        "layers.0.self_attn.k_proj": (keys, HIDDEN),
        "layers.0.self_attn.v_proj": (keys, HIDDEN),
        "layers.0.self_attn.o_proj": (HIDDEN, queries),
        "layers.0.mlp.gate_proj": (FFN, HIDDEN),
        "layers.0.mlp.up_proj": (FFN, HIDDEN),
        "layers.0.mlp.down_proj": (HIDDEN, FFN),
        "layers.0.post_attention_layernorm": (HIDDEN,),
    }
    random = torch.Generator().manual_seed(11)
    weights = {
        f"{name}.weight": (torch.randn(shape, generator=random) * shape[-1] ** -0.5).bfloat16()
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def start(contract: str, folder: Path, eager: bool, drafts: int) -> Any:
    """The engine, with its defaults but for lengths that chunk these prompts.

    With ``drafts`` a head guesses so many tokens, of which half are taken whatever they are: a random one guesses none right.
    """
    from vllm import LLM

    from isoexec.adapters.vllm.adapter import engine_args
    from isoexec.adapters.vllm.engines import sized_cache

    args: dict[str, Any] = {
        "model": str(folder),
        "dtype": "bfloat16",
        "max_model_len": MOST,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 64,
        **sized_cache(8 << 30),
        "skip_tokenizer_init": True,
        "seed": 0,
    }
    if eager:
        args["enforce_eager"] = True
    if drafts:
        args["speculative_config"] = {
            "method": "eagle",
            "model": str(draft(folder.with_name("draft"))),
            "num_speculative_tokens": drafts,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": 1 + drafts / 2,
        }
    return LLM(**engine_args(contract, **args))


def report(llm: Any, contract: str) -> dict[str, Any]:
    """What every worker binds; raises naming the regions that do not hold."""
    from isoexec.adapters.vllm.adapter import collect_reports, report_of

    loaded = Contract.load(contract)
    raw = collect_reports(llm, 100.0)
    problems = [p for one in raw for p in report_of(one, loaded).problems()]
    if problems:
        raise AssertionError(" | ".join(problems))
    return {name: [r["object"], r["provider"], r["ok"]] for name, r in raw[0]["regions"].items()}


def replays(llm: Any, eager: bool) -> dict[str, int]:
    """How often head and logprobs were graphs of their own; raises where they never were, or were in an eager engine."""
    from isoexec.adapters.vllm.adapter import collect_reports

    regions = ("lm_head", "logprobs")
    found = [
        {region: one["replays"].get(region, 0) for region in regions} for one in collect_reports(llm, 100.0)
    ]
    if any((count > 0) == eager for one in found for count in one.values()):
        raise AssertionError(f"wanted {'none' if eager else 'some of either'}, found {found}")
    return found[0]


Scores = list[tuple[list[int], np.ndarray[Any, Any]]]


def decode(llm: Any, prompts: Sequence[list[int]], count: int, temperature: float = 1.0) -> Scores:
    """Each prompt's sampled tokens and the fp32 logprob of each."""
    from vllm import SamplingParams, TokensPrompt

    params = [
        SamplingParams(
            max_tokens=count + i % 7,
            temperature=temperature,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
            seed=i,
        )
        for i in range(len(prompts))
    ]
    outputs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], params, use_tqdm=False)
    made: Scores = []
    for output in outputs:
        (one,) = output.outputs
        tokens = list(one.token_ids)
        values = [step[token].logprob for step, token in zip(one.logprobs, tokens, strict=True)]
        made.append((tokens, np.asarray(values, np.float64).astype(np.float32)))
    return made


def score(llm: Any, sequences: Sequence[tuple[list[int], list[int]]]) -> list[np.ndarray[Any, Any]]:
    """The fp32 logprobs of each (prompt, tokens)'s tokens, read as a prompt."""
    from vllm import SamplingParams, TokensPrompt

    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    whole = [TokensPrompt(prompt_token_ids=[*prompt, *tokens]) for prompt, tokens in sequences]
    found = []
    for (prompt, tokens), output in zip(sequences, llm.generate(whole, params, use_tqdm=False), strict=True):
        steps = output.prompt_logprobs[len(prompt) :]
        values = [step[token].logprob for step, token in zip(steps, tokens, strict=True)]
        found.append(np.asarray(values, np.float64).astype(np.float32))
    return found


def same(wanted: Sequence[np.ndarray[Any, Any]], found: Sequence[np.ndarray[Any, Any]]) -> dict[str, Any]:
    """How many logprobs there are, as integers; raises where any differs, or where there is nothing to compare."""
    a, b = np.concatenate(wanted), np.concatenate(found)
    if len(a) != len(b) or not len(a):
        raise AssertionError(f"{len(a)} logprobs against {len(b)}")
    if not np.isfinite(a).all():
        raise AssertionError(f"{int((~np.isfinite(a)).sum())} logprobs are not finite")
    differ = a.view(np.int32) != b.view(np.int32)
    if differ.any():
        by_request = [
            int((x.view(np.int32) != y.view(np.int32)).sum()) for x, y in zip(wanted, found, strict=True)
        ]
        raise AssertionError(
            f"{int(differ.sum())} of {len(a)} logprobs differ, by up to {np.abs(a - b).max():.3e}; by request {by_request}"
        )
    return {"equal": len(a), "distinct": len(np.unique(a)), "mean": float(a.mean())}


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    """Token ids of these lengths, none like another."""
    made = np.random.default_rng(3)
    return [made.integers(10, VOCAB, size=n).tolist() for n in lengths]


def main() -> int:
    """Every stage in order; the number that failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="no stage begins after these")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--contract", help="a contract of one's own, and not `qwen3-dense-sm90` as shipped")
    parser.add_argument("--eager", action="store_true", help="neither compiled nor captured")
    parser.add_argument("--drafts", type=int, default=0, help="tokens that an EAGLE head guesses at a time")
    parser.add_argument("--tied", action="store_true", help="the output head is the embedding")
    asked = parser.parse_args()
    run = Run(asked.seconds)
    with tempfile.TemporaryDirectory() as place:
        stages(run, asked.contract or str(library("qwen3-dense-sm90")), Path(place), asked)
    failed = [one["stage"] for one in run.found if not one["ok"]]
    print(
        json.dumps(
            {"failed": failed, "of": len(run.found), "seconds": round(time.monotonic() - run.began, 1)}
        )
    )
    return len(failed)


def stages(run: Run, contract: str, place: Path, asked: argparse.Namespace) -> None:
    """All stages of one engine, in `place`."""
    held = run.held
    first, second = place / "first", place / "second"
    run.stage("versions", versions)
    run.stage("contract", lambda: planned(contract))
    if not run.stage("checkpoint", lambda: make(first, asked.layers, asked.tied, 7)):
        return

    def engine() -> str:
        held["llm"] = start(contract, first, asked.eager, asked.drafts)
        return str(held["llm"].llm_engine.vllm_config.compilation_config.cudagraph_mode)

    if not run.stage("engine", engine):
        return
    llm = held["llm"]
    prompts = prompts_of(LENGTHS)
    run.stage("report", lambda: report(llm, contract))

    def mixed() -> dict[str, Any]:
        held["decoded"] = decode(llm, prompts, 24)
        return {"tokens": sum(len(tokens) for tokens, _ in held["decoded"])}

    if run.stage("mixed", mixed):
        made: Scores = held["decoded"]
        pairs = [(prompt, tokens) for prompt, (tokens, _) in zip(prompts, made, strict=True)]
        values = [logprobs for _, logprobs in made]
        run.stage("rescored", lambda: same(values, score(llm, pairs)))
        some = (1, 4, 8)

        def alone() -> dict[str, Any]:
            found = same([values[i] for i in some], [score(llm, [pairs[i]])[0] for i in some])
            # the seed is the place in the pack: the first has it alone, too
            again = decode(llm, prompts[:1], 24)
            return found | {"decoded": same(values[:1], [again[0][1]])}

        run.stage("alone", alone)

        def long() -> dict[str, Any]:
            (prompt,) = prompts_of((5000,))
            ((tokens, logprobs),) = decode(llm, [prompt], 40)
            return same([logprobs], score(llm, [(prompt, tokens)]))

        run.stage("long", long)

        def company() -> dict[str, Any]:
            more = [(p, p[:1] * 3) for p in prompts_of((9, 40, 250, 1100))]
            order = [*pairs[::-1], *more]
            return same(values[::-1], score(llm, order)[: len(values)])

        run.stage("company", company)

        def reload() -> dict[str, Any]:
            make(second, asked.layers, asked.tied, 8)
            ((file,), (other,)) = (list(folder.glob("*.safetensors")) for folder in (first, second))
            told = []
            for path, version in ((other, 2), (file, 1)):
                llm.collective_rpc("isoexec_load_weights", args=(str(path), version))
                llm.reset_prefix_cache()
                told.append(score(llm, pairs))
                fresh = decode(llm, prompts, 8)  # by graphs, which read the weights where they lie
                read = score(llm, [(p, tokens) for p, (tokens, _) in zip(prompts, fresh, strict=True)])
                same([logprobs for _, logprobs in fresh], read)
            if all(np.array_equal(a.view(np.int32), b.view(np.int32)) for a, b in zip(*told, strict=True)):
                raise AssertionError("other weights gave the same logprobs")
            return same(values, told[1])

        run.stage("reload", reload)
    run.stage("again", lambda: report(llm, contract))
    run.stage("replays", lambda: replays(llm, asked.eager))


if __name__ == "__main__":
    sys.exit(main())
