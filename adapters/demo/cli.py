# SPDX-License-Identifier: Apache-2.0
"""`isoexec demo`: the main job end to end on two CPU cores, on the real engines, nothing downloaded."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from isoexec.adapters.demo.faults import FAULTS
from isoexec.adapters.demo.job import Layout
from isoexec.adapters.demo.phases import Stage, clear_run, fault_phase, plain_phase
from isoexec.adapters.demo.report import PhaseResult, table, write
from isoexec.adapters.demo.scenes import EXPERTS, MATRIX, hybrid_scene, matrix_scene
from isoexec.adapters.demo.services import Daemon, Prometheus
from isoexec.adapters.demo.tiny import make_mimo, make_qwen3, make_qwen3_moe
from isoexec.contracts.schema import library
from isoexec.contracts.window import REGIMES

__all__ = ["run"]

_PHASES = ("monitor", "contract", "contract-tp2", "fault")
_MODELS: dict[str, tuple[Callable[..., Path], str]] = {
    "qwen3": (make_qwen3, "qwen3-dense-cpu"),
    "mimo": (make_mimo, "mimo-dense-cpu"),
    "qwen3-moe": (partial(make_qwen3_moe, chosen=3), "qwen3-moe-cpu"),
}
_SEED = 20


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="isoexec demo", description=run.__doc__)
    parser.add_argument(
        "--scene",
        choices=("grpo", "matrix", "hybrid"),
        default="grpo",
        help="grpo: the job in phases; matrix: bitwise equality over every layout; hybrid: a Gated DeltaNet model, watched only",
    )
    parser.add_argument(
        "--model", choices=sorted(_MODELS), default="qwen3", help="the tiny model and its contract"
    )
    parser.add_argument(
        "--cells", help=f"comma-separated, of the matrix's {', '.join(MATRIX)} (default: those the model has)"
    )
    parser.add_argument("--steps", type=int, default=6, help="watched steps a phase (default 6)")
    parser.add_argument("--engine-tp", type=int, choices=(1, 2), help="engine TP of the contract phases")
    parser.add_argument("--trainer-tp", type=int, choices=(1, 2), help="trainer TP of the contract phases")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--regime", choices=REGIMES, default="bitwise", help="regime of the contract phases")
    parser.add_argument(
        "--fault", choices=sorted(FAULTS), default="topology", help="the fault of the last phase"
    )
    parser.add_argument(
        "--phases", default=",".join(_PHASES), help=f"comma-separated, of {', '.join(_PHASES)}"
    )
    parser.add_argument(
        "--keep", action="store_true", help="go on serving metrics after the run, until interrupted"
    )
    parser.add_argument("--report", type=Path, default=Path("demo-report"), help="folder of the report")
    return parser


def run(argv: Sequence[str]) -> int:
    """Run a small RL job natively, under a contract, and with a promise broken; show what the daemon sees."""
    parser = _parser()
    args = parser.parse_args(argv)
    phases = [p for p in args.phases.split(",") if p]
    unknown = [p for p in phases if p not in _PHASES]
    if unknown or not phases:
        parser.error(f"--phases: wanted some of {', '.join(_PHASES)}, found {', '.join(unknown) or 'none'}")
    other = ("TP1xPP2",) if args.model == "qwen3-moe" else EXPERTS
    chosen = [c for c in MATRIX if c not in other] if args.cells is None else args.cells.split(",")
    cells = [c for c in chosen if c]
    if set(cells) - set(MATRIX) or not cells:
        parser.error(f"--cells: wanted some of {', '.join(MATRIX)}, found {args.cells or 'none'}")
    if args.steps < 2:
        parser.error(f"--steps: wanted at least 2, found {args.steps}")
    console = Console() if sys.stdout.isatty() else Console(width=124)
    started = time.perf_counter()
    with ExitStack() as stack:
        work = Path(tempfile.mkdtemp(prefix="isoexec-demo-"))
        stack.push(_keep_logs_of_a_failure(console, work))
        state = work / "state"
        daemon = Daemon(state, work / "daemon.log")
        stack.callback(daemon.close)
        prometheus = None
        if Prometheus.installed():
            prometheus = Prometheus(work / "prometheus", daemon.target)
            stack.callback(prometheus.close)
        else:
            console.print(
                "Prometheus was not found on PATH: nothing scrapes this run (make prometheus gets it)"
            )
        console.print(f"daemon {daemon.url}, metrics at {daemon.url}/metrics")
        progress = stack.enter_context(
            Progress(
                TextColumn("{task.description:<28}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=console,
            )
        )
        make, contract = _MODELS[args.model]
        stage = Stage(
            daemon=daemon,
            prometheus=prometheus,
            model=make(work / "model", seed=_SEED),
            work=work,
            contract=library(contract),
            tick=_ticker(progress),
        )
        if args.scene == "matrix":
            results = matrix_scene(stage, dtypes=("bfloat16", "float32"), names=cells)
        elif args.scene == "hybrid":
            results = [hybrid_scene(stage)]
        else:
            results = _grpo(stage, args, phases)
        metrics = daemon.metrics()
        firing = sorted({a["alertname"] for a in prometheus.firing()}) if prometheus is not None else None
        for result in results:
            if result.settings is not None and not args.keep:
                clear_run(result, result.settings)
        write(args.report, results, journal=daemon.state.journal, metrics=metrics)
        progress.stop()
        _print(console, results, firing, metrics)
        console.print(f"report: {args.report}/ (report.json, plot.png, journal.sqlite, metrics.txt)")
        console.print(f"whole demo: {time.perf_counter() - started:.0f} s")
        if args.keep:
            _keep(console, daemon)
    return 0


def _keep_logs_of_a_failure(console: Console, work: Path) -> Callable[..., bool]:
    def leave(kind: type[BaseException] | None, *_: object) -> bool:
        if kind is None:
            shutil.rmtree(work, ignore_errors=True)
        else:
            console.print(f"logs of every process are kept in {work}")
        return False

    return leave


def _grpo(stage: Stage, args: argparse.Namespace, phases: Sequence[str]) -> list[PhaseResult]:
    contract, steps = stage.contract, args.steps
    engine_tp, trainer_tp = args.engine_tp or 1, args.trainer_tp or 1
    results = []
    if "monitor" in phases:
        layout = Layout(dtype=args.dtype)
        native = "bf16_dense" if args.dtype == "bfloat16" else "near_bitwise"
        results.append(plain_phase(stage, "monitor", layout, steps=steps, contract=None, regime=native))
    if "contract" in phases:
        layout = Layout(engine_tp=engine_tp, trainer_tp=trainer_tp, dtype=args.dtype)
        results.append(
            plain_phase(stage, "contract", layout, steps=steps, contract=contract, regime=args.regime)
        )
    if "contract-tp2" in phases:
        layout = Layout(engine_tp=engine_tp, trainer_tp=args.trainer_tp or 2, dtype=args.dtype)
        results.append(
            plain_phase(stage, "contract-tp2", layout, steps=steps, contract=contract, regime=args.regime)
        )
    if "fault" in phases:
        fault = FAULTS[args.fault]
        layout = Layout(
            engine_tp=args.engine_tp or fault.engine_tp,
            trainer_tp=args.trainer_tp or fault.trainer_tp,
            dtype=args.dtype,
        )
        results.append(fault_phase(stage, fault, layout, steps=max(4, steps // 2), regime=args.regime))
    return results


def _ticker(progress: Progress) -> Callable[[str, int, int], None]:
    bars: dict[str, int] = {}

    def tick(name: str, done: int, of: int) -> None:
        if name not in bars:
            bars[name] = progress.add_task(name, total=of)
        progress.update(bars[name], completed=done)  # type: ignore[arg-type]  # rich's TaskID is an int

    return tick


def _print(
    console: Console, results: Sequence[PhaseResult], firing: Sequence[str] | None, metrics: str
) -> None:
    native = next((r for r in results if r.name == "monitor"), None)
    bare = native.seconds(watched=False) if native is not None else math.nan
    console.print(table(results, bare))
    if native is not None:
        watched = native.seconds(watched=True)
        steps = [s.seconds for s in native.steps[1:] if s.watched]
        probes, rescore = (median(s[name] for s in steps) for name in ("probe", "rescore"))
        console.print(
            f"watching the native job, medians: {watched:.3f} s a step against {bare:.3f} s unwatched "
            f"({(watched / bare - 1) * 100:+.1f} %), of it the probes {probes * 1e3:.0f} ms (logprobs, weight digests, "
            f"attestation) and the engine's rescore of a sample {rescore * 1e3:.0f} ms",
            soft_wrap=True,
        )
    for result in results:
        for line in [*([f"{result.verdict}, {result.cause}"] if result.cause else []), *result.lines]:
            console.print(f"  {result.name}: {line}", soft_wrap=True, highlight=False, markup=False)
    if shutil.which("promtool"):
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=metrics, capture_output=True, text=True, check=False
        )
        console.print(
            "promtool check metrics: " + ("clean" if checked.returncode == 0 else checked.stderr.strip())
        )
    if firing is not None:
        console.print(f"alerts firing in Prometheus as the job ended: {', '.join(firing) or 'none'}")


def _keep(console: Console, daemon: Daemon) -> None:
    console.print(f"metrics stay at {daemon.url}/metrics, the status page at {daemon.url}/; Ctrl-C ends it.")
    console.print(
        f"Prometheus and Grafana: isoexec dashboards config --target {daemon.target} --out watch, then\n"
        "  prometheus --config.file=watch/prometheus.yml\n"
        "and let Grafana's provisioning read watch/grafana."
    )
    try:
        daemon.process.wait()
    except KeyboardInterrupt:
        console.print("stopped")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(run(sys.argv[1:]))
