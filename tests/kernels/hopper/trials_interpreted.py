# SPDX-License-Identifier: Apache-2.0
"""Calls what the trials of `tests/bench` time at tiny sizes in Triton's interpreter, and prints what they found as JSON.

Nothing is timed: a captured call is one call. What the hand-off's trial does between GPUs is checked elsewhere; here are its
choices and its report.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gated  # type: ignore[import-not-found]  # first: it asks for the interpreter, and gives the ops CPU kernels
import torch
from gated import replace

gated.smaller()
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import handoff  # type: ignore[import-not-found]  # noqa: E402
import handoff_cases  # type: ignore[import-not-found]  # noqa: E402
import handoff_work  # type: ignore[import-not-found]  # noqa: E402
import logprobs_hopper  # type: ignore[import-not-found]  # noqa: E402
import moe_hopper  # type: ignore[import-not-found]  # noqa: E402
import rows_tuning  # type: ignore[import-not-found]  # noqa: E402

from isoexec.kernels.linear.hopper import table  # noqa: E402
from isoexec.kernels.linear.hopper.handoff import schedule  # noqa: E402

GPUS = 2


def _once(call: Any, _: int) -> Any:
    return call(0)


def _spans(graphs: list[Any], *_: Any, **__: Any) -> list[float]:
    return [10.0 + i for i in range(len(graphs))]


def rows() -> dict[str, int]:
    """Candidates of each row kernel; the last has the bits of the setting that the launch chooses."""
    found = {}
    for trial in rows_tuning.trials(2):
        inputs = trial.make()
        trial.write(*inputs)
        want = [inputs[i].clone() for i in trial.outputs]
        for i in trial.outputs:
            inputs[i].fill_(float("nan"))
        trial.write(*inputs, **trial.candidates[-1])
        assert all(torch.equal(inputs[i], w) for i, w in zip(trial.outputs, want, strict=True)), trial.name
        found[trial.name] = len(trial.candidates)
    return found


def experts() -> dict[str, Any]:
    """Elements in which a grouped product differs from the chain, and what the trial of tiles gives."""
    tile = gated.kernel_tile(16, 32, 32)
    replace(moe_hopper, TILES=(tile,), capture=_once, replay_times=_spans)
    same = moe_hopper.compared(3, 32, 64, 9)
    other = gated.products.library
    replace(gated.products, library=lambda *inputs: other(*inputs) * 1.01)
    wrong = moe_hopper.compared(3, 32, 64, 9)
    replace(gated.products, library=other)
    tried = [moe_hopper.fastest([torch.randn(3, 32, 64).bfloat16()], 9, down) for down in (False, True)]
    return {"same": same, "wrong": wrong, "tried": [(a, b, asdict(t) == asdict(tile)) for a, b, t in tried]}


def logprobs() -> dict[str, list[str]]:
    """The tables that the trials of logprobs make."""
    vocab, K = gated.HEAD
    listed = {gated.HEAD: ((8192, gated.HEAD_TILE),)}
    replace(table, tiles=lambda: listed)
    replace(
        logprobs_hopper,
        VOCAB=vocab,
        LEAVES=2,
        CUTS=[gated.FEW_BLOCKS],
        CANDIDATES=(gated.FUSED,),
        CHUNKS=[gated.Chunks(rows=4, leaves=1)],
        capture=_once,
        replay_times=_spans,
        copies_for=lambda _: 1,
    )
    gated.cublaslt.claim()
    logprobs_hopper.from_logits((3,))
    logprobs_hopper.fused(K, (5,))
    tables = logprobs_hopper.TABLES
    return {name: [str(row.get("cut", row.get("provider"))) for row in tables[name]] for name in tables}


def handed(folder: Path) -> dict[str, Any]:
    """Choices of the checked-in table for every product, and the report of a log."""
    handoff_work.dist.get_world_size = lambda: GPUS
    chosen = {
        f"{case.name} {case.product} {M} {form}": handoff_cases.label(one)
        for case in handoff_cases.CASES
        for M in handoff_cases.ROWS
        for form in handoff_cases.FORMS
        for one in handoff_work.schedules(case, M, form, True)
    }
    tried = sum(
        len(handoff_cases.candidates(case, M)) for case in handoff_cases.CASES for M in handoff_cases.ROWS
    )
    case = handoff_cases.CASES[0]
    one, two, *_ = handoff_cases.candidates(case, 8192)
    head = {"case": case.name, "product": "row", "N": case.N, "K": case.K, "form": "all", "native": 100.0}
    head |= {"predicted": 1.0, "control": 7, "differ": 0, "differ_after": 0}
    lines = [
        {"device": "none", "torch": "2", "cuda": "13", "triton": "3", "date": "today"},
        head | {"rows": 8192, "schedule": "one", "made": asdict(one), "us": 104.0},
        head | {"rows": 8192, "schedule": "two", "made": asdict(two), "us": 90.0, "differ_after": 1},
        head | {"rows": 64, "schedule": "one", "made": asdict(one), "us": 130.0},
    ]
    replace(handoff, OUT=folder, LOG=folder / "log")
    handoff.LOG.write_text("".join(json.dumps(line) + "\n" for line in lines))
    handoff.reported(GPUS, shipped=False)
    made = json.loads((folder / "handoff-table.json").read_text())
    replace(schedule, PATH=folder / "handoff-table.json")
    schedule._steps.cache_clear()
    back = [schedule.choose(M, case.N, case.K, GPUS) == one for M in (8192, 64)]
    page = (folder / "handoff.md").read_text()
    return {"chosen": chosen, "tried": tried, "page": page, "products": len(made["products"]), "back": back}


def main() -> None:
    """Each trial in turn."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name, torch.no_grad(), contextlib.redirect_stdout(sys.stderr):
        found = {"rows": rows(), "experts": experts(), "logprobs": logprobs(), "handed": handed(Path(name))}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
