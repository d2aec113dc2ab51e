# SPDX-License-Identifier: Apache-2.0
"""How long `contract digest` and `diff` take on the largest shipped contract: in process, and as commands.

`python tests/bench/bench_contract.py [--runs N] [FILE]`. In process a digest is reading the file, making the contract and its
three identities; a diff is that for two files, and comparing them. The commands are measured beside a bare interpreter. Beside
the time that passed stands the processor time: on a machine with other work only that says something of the code.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from isoexec.contracts.diff import diff
from isoexec.contracts.schema import Contract, library

LIMIT_MS = 50.0


@dataclass(frozen=True, kw_only=True)
class Times:
    """Medians and best of several calls, in milliseconds: time that passed, and processor time with children."""

    passed: float
    best: float
    processor: float


def measured(act: Callable[[], object], runs: int) -> Times:
    passed, processor = [], []
    for _ in range(runs):
        spent, start = processor_seconds(), time.perf_counter()
        act()
        passed.append((time.perf_counter() - start) * 1e3)
        processor.append((processor_seconds() - spent) * 1e3)
    return Times(passed=statistics.median(passed), best=min(passed), processor=statistics.median(processor))


def processor_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def command(*argv: str) -> Callable[[], object]:
    return lambda: subprocess.run(
        [sys.executable, *argv], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
    )


def edited(path: Path, folder: Path) -> Path:
    """A copy of a contract in which every constant of every region is another."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    for binding in data["composition"]:
        for name, value in binding.get("constants", {}).items():
            binding["constants"][name] = value + 1 if isinstance(value, int) else f"{value}_other"
    other = folder / "other.yaml"
    other.write_text(yaml.safe_dump(data), encoding="utf-8")
    return other


def main(argv: list[str] | None = None) -> int:
    """Print medians; 1 when digest or diff in process is over the limit, by the processor time on a busy machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "file", nargs="?", type=Path, help="a contract; the largest shipped one, when left out"
    )
    parser.add_argument("--runs", type=int, default=25)
    args = parser.parse_args(argv)
    path: Path = args.file or max(library().glob("*.yaml"), key=lambda one: one.stat().st_size)
    with tempfile.TemporaryDirectory() as folder:
        other = edited(path, Path(folder))
        found = len(diff(Contract.load(path), Contract.load(other)))
        print(
            f"{path.name}: {path.stat().st_size} bytes; its copy differs in {found} fields; {args.runs} runs each"
        )
        print(f"libyaml: {'yes' if yaml.__with_libyaml__ else 'no'}; Python {sys.version.split()[0]}")
        inside = {
            "digest, in process": lambda: Contract.load(path).identities,
            "diff, in process": lambda: diff(Contract.load(path), Contract.load(other)),
        }
        outside = {
            "python -c pass": command("-c", "pass"),
            "isoexec contract digest": command(
                "-m", "isoexec.contracts.main", "contract", "digest", str(path)
            ),
            "isoexec contract diff": command(
                "-m", "isoexec.contracts.main", "contract", "diff", str(path), str(other)
            ),
        }
        worst = 0.0
        for name, act in {**inside, **outside}.items():
            found_times = measured(act, args.runs)
            print(
                f"{name:24} median {found_times.passed:6.1f} ms, best {found_times.best:6.1f} ms, "
                f"processor {found_times.processor:6.1f} ms"
            )
            if name in inside:
                worst = max(worst, min(found_times.passed, found_times.processor))
    print(f"in process under {LIMIT_MS:.0f} ms: {'yes' if worst < LIMIT_MS else 'NO'}")
    return 0 if worst < LIMIT_MS else 1


if __name__ == "__main__":
    sys.exit(main())
