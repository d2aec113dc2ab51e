# SPDX-License-Identifier: Apache-2.0
"""The coverage census: what a runtime computed outside every contract region, case by case, and what may be.

`isoexec.adapters.arithmetic` says what counts, `isoexec.adapters.recorder` sees it; here it is judged by an allow-list, in which
every entry has a reason and one that nothing used is reported.  `run` is `isoexec census`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from isoexec.contracts.errors import IsoExecError
from isoexec.contracts.schema import Contract, library

if TYPE_CHECKING:
    from isoexec.adapters.recorder import Recorder

__all__ = ["Allowed", "Census", "CensusEntry", "CensusError", "load_allowed", "main", "run", "take_census"]


class CensusError(IsoExecError):
    """An allow-list that cannot be read, or a census that could not be taken."""


@dataclass(frozen=True, kw_only=True)
class CensusEntry:
    """One place where arithmetic ran outside every region.

    ``stack`` holds the innermost Python frames that are not torch's, innermost first; in backward those of the forward that made
    the gradient ``node``.  ``reason`` is the allow-list's, or None where nothing allows it.
    """

    case: str
    operator: str
    kind: str
    module: str
    dtype: str
    calls: int
    shapes: tuple[str, ...] = ()
    node: str = ""
    stack: tuple[str, ...] = ()
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "operator": self.operator,
            "kind": self.kind,
            "module": self.module,
            "dtype": self.dtype,
            "calls": self.calls,
            "shapes": list(self.shapes),
            "node": self.node,
            "stack": list(self.stack),
            "reason": self.reason,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CensusEntry:
        return cls(**{**data, "shapes": tuple(data["shapes"]), "stack": tuple(data["stack"])})

    def lines(self) -> list[str]:
        """In words, the first line without its stack."""
        where = f"{self.module or 'no module'}" + (f", backward of {self.node}" if self.node else "")
        shapes = " ".join(self.shapes)
        head = f"{self.operator} ({self.kind}) x{self.calls} in {where}: {self.dtype} {shapes}".rstrip()
        return [head, *(f"    {frame}" for frame in self.stack)]


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """An allow-list entry: ``operator`` and ``module`` are shell patterns, ``cases`` empty for every case.

    ``optional`` entries are not reported when nothing uses them: what they allow depends on how a job is set up.
    """

    operator: str
    module: str
    reason: str
    cases: tuple[str, ...] = ()
    node: str = "*"
    optional: bool = False

    def admits(self, entry: CensusEntry) -> bool:
        return (
            fnmatchcase(entry.operator, self.operator)
            and fnmatchcase(entry.module, self.module)
            and fnmatchcase(entry.node, self.node)
            and (not self.cases or entry.case in self.cases)
        )

    def __str__(self) -> str:
        cases = f" ({', '.join(self.cases)})" if self.cases else ""
        return f"{self.operator} in {self.module or 'no module'}{cases}: {self.reason}"


def load_allowed(path: Path | str) -> tuple[Allowed, ...]:
    """The allow-list in a YAML file; CensusError for an entry without operator, module or reason, or with an unknown field."""
    rows = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or []
    if not isinstance(rows, list):
        raise CensusError(f"{path}: wanted a list of entries")
    known = {"operator", "module", "reason", "cases", "node", "optional"}
    found = []
    for index, row in enumerate(rows):
        at = f"{path}: entry {index + 1}"
        if not isinstance(row, dict) or set(row) - known:
            extra = sorted(set(row) - known) if isinstance(row, dict) else row
            raise CensusError(f"{at}: unknown {extra}; an entry has {', '.join(sorted(known))}")
        for name in ("operator", "module", "reason"):
            if not isinstance(row.get(name), str) or (name != "module" and not row[name].strip()):
                raise CensusError(f"{at}: no {name}; say which, and why it may run outside a region")
        found.append(Allowed(**{**row, "cases": tuple(row.get("cases", ()))}))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Census:
    """What one runtime ran: ``inside`` counts operators inside regions by case, ``entries`` everything outside them."""

    runtime: str
    versions: Mapping[str, str]
    contract: str | None
    inside: Mapping[str, int]
    entries: tuple[CensusEntry, ...]
    stale: tuple[str, ...] = ()

    @property
    def outside(self) -> tuple[CensusEntry, ...]:
        """The entries that nothing allows."""
        return tuple(e for e in self.entries if e.reason is None)

    @property
    def allowed(self) -> tuple[CensusEntry, ...]:
        return tuple(e for e in self.entries if e.reason is not None)

    @property
    def clean(self) -> bool:
        """Whether every case ran, all its arithmetic in regions or allowed, and every allow-list entry is used."""
        return bool(self.inside) and all(self.inside.values()) and not self.outside and not self.stale

    def case(self, name: str) -> tuple[CensusEntry, ...]:
        """The entries of one case that nothing allows."""
        return tuple(e for e in self.outside if e.case == name)

    def clean_in(self, case: str) -> bool:
        """Whether one case ran, with all its arithmetic in regions or allowed."""
        return bool(self.inside.get(case)) and not self.case(case)

    @classmethod
    def judged(
        cls,
        recorders: Sequence[Recorder],
        allowed: Sequence[Allowed],
        *,
        runtime: str,
        versions: Mapping[str, str],
        contract: str | None,
    ) -> Census:
        """The census of what ``recorders`` saw, one a case, under an allow-list."""
        entries = [entry for r in recorders for entry in r.entries()]
        return cls.of(
            entries,
            {r.case: r.inside for r in recorders},
            allowed,
            runtime=runtime,
            versions=versions,
            contract=contract,
        )

    @classmethod
    def of(
        cls,
        entries: Iterable[CensusEntry],
        inside: Mapping[str, int],
        allowed: Sequence[Allowed],
        *,
        runtime: str,
        versions: Mapping[str, str],
        contract: str | None,
    ) -> Census:
        """Judge entries by an allow-list; an entry of the list that admits none of them is stale."""
        used: set[int] = set()
        judged = []
        for entry in entries:
            index = next((i for i, a in enumerate(allowed) if a.admits(entry)), None)
            if index is not None:
                used.add(index)
                entry = replace(entry, reason=allowed[index].reason)  # noqa: PLW2901
            judged.append(entry)
        ran = set(inside)
        stale = [
            str(a)
            for i, a in enumerate(allowed)
            if i not in used and not a.optional and (not a.cases or ran & set(a.cases))
        ]
        judged.sort(key=lambda e: (e.case, -e.calls, e.operator, e.module))
        return cls(
            runtime=runtime,
            versions=dict(versions),
            contract=contract,
            inside=dict(inside),
            entries=tuple(judged),
            stale=tuple(stale),
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "runtime": self.runtime,
            "versions": dict(self.versions),
            "contract": self.contract,
            "clean": self.clean,
            "inside": dict(self.inside),
            "entries": [e.to_dict() for e in self.entries],
            "stale": list(self.stale),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Census:
        return cls(
            runtime=data["runtime"],
            versions=data["versions"],
            contract=data["contract"],
            inside=data["inside"],
            entries=tuple(CensusEntry.from_dict(e) for e in data["entries"]),
            stale=tuple(data["stale"]),
        )

    def text(self) -> str:
        """For people: one line a case, then what is outside with its stack, what is allowed with its reason, what is stale."""
        versions = ", ".join(f"{k} {v}" for k, v in sorted(self.versions.items()))
        lines = [f"{self.runtime}: {versions}; {self.contract or 'no contract'}"]
        for case, inside in self.inside.items():
            here = self.case(case)
            calls = sum(e.calls for e in here)
            said = f"{calls} outside, in {len(here)} places" if here else "nothing outside"
            allowed = sum(e.calls for e in self.allowed if e.case == case)
            lines.append(f"  {case:<18} {said}; {inside} in regions, {allowed} allowed")
            for entry in here:
                lines += [f"    {line}" for line in entry.lines()]
        reasons: dict[str, list[str]] = {}
        for entry in self.allowed:
            names = reasons.setdefault(entry.reason or "", [])
            if entry.operator not in names:
                names.append(entry.operator)
        lines += [f"  allowed: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
        lines += [f"  stale: {line}; nothing uses it, take it out of the list" for line in self.stale]
        return "\n".join(lines)


# -- the command -------------------------------------------------------------------------------------------------------

_RUNTIMES = ("vllm", "megatron")
_ENV = {
    "vllm": {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker is in the process that watches
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_PLUGINS": "isoexec",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    },
    "megatron": {},
}


def main(take: Callable[[str, str | None, str], Census]) -> None:
    """A runtime's own process: what is asked (model, contract, dtype) comes as JSON on stdin, the answer goes to a file."""
    asked = json.loads(sys.stdin.read())
    try:
        census = take(asked["model"], asked["contract"], asked["dtype"])
        answer: dict[str, Any] = {"census": census.to_dict()}
    except IsoExecError as error:
        answer = {"error": str(error)}
    Path(asked["out"]).write_text(json.dumps(answer), encoding="utf-8")


def take_census(runtime: str, model: str, contract: str | None, dtype: str = "bfloat16") -> Census:
    """The census of one runtime, taken in a process of its own: an engine reads its environment when it is imported.

    Raises CensusError where that process does not answer, with the end of what it said.
    """
    claims = Contract.load(contract).claims.environment.variables if contract else {}
    unset = {"ISOEXEC_RUN", "ISOEXEC_STATE_DIR", "ISOEXEC_CONTRACT"}
    env = {k: v for k, v in os.environ.items() if k not in unset} | _ENV[runtime] | dict(claims)
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "census.json"), Path(folder, "log")
        asked = {"model": model, "contract": contract, "dtype": dtype, "out": str(out)}
        with log.open("w") as said:
            done = subprocess.run(
                [sys.executable, "-P", "-m", f"isoexec.adapters.{runtime}.census"],
                input=json.dumps(asked),
                text=True,
                stdout=said,
                stderr=said,
                env=env,
                check=False,
            )
        if not out.is_file():
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise CensusError(f"the census of {runtime} ended with {done.returncode}:\n{tail}")
        answer = json.loads(out.read_text())
    if "error" in answer:
        raise CensusError(f"the census of {runtime}: {answer['error']}")
    return Census.from_dict(answer["census"])


def run(argv: list[str]) -> int:
    """Run one forward of each case on the real engines and list the arithmetic outside every contract region."""
    parser = argparse.ArgumentParser(prog="isoexec census", description=run.__doc__)
    parser.add_argument("--runtime", choices=(*_RUNTIMES, "both"), default="both")
    parser.add_argument("--model", default="tiny", help="a Hugging Face folder, or tiny: a small dense Qwen3")
    parser.add_argument(
        "--contract",
        default="qwen3-dense-cpu",
        help="a shipped contract, a file, or none to see a runtime as it is",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    args = parser.parse_args(argv)
    contract = None
    if args.contract != "none":
        named = Path(args.contract)
        contract = str(named if named.suffix else library(args.contract))
    found = []
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if model == "tiny":
            from isoexec.adapters.demo.tiny import make_qwen3

            model = str(make_qwen3(Path(folder, "qwen3"), seed=7))
        for runtime in _RUNTIMES if args.runtime == "both" else (args.runtime,):
            found.append(take_census(runtime, model, contract, args.dtype))
            if args.format == "text":
                print(found[-1].text(), flush=True)
    clean = all(census.clean for census in found)
    if args.format == "json":
        print(
            json.dumps({"clean": clean, "runtimes": [c.to_dict() for c in found]}, indent=2, sort_keys=True)
        )
    else:
        print("clean" if clean else "not clean: what is listed runs outside every region of the contract")
    return 0 if clean else 1
