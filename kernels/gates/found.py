# SPDX-License-Identifier: Apache-2.0
"""What there is to run: the gates by their place, the constants that contracts bind, and the environment of this process."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path

import torch

from isoexec.contracts.canonical import encode
from isoexec.contracts.schema import Contract, library
from isoexec.kernels import registry, switches
from isoexec.kernels.gates.checking import Gate, GateError, Value

__all__ = ["constants_of", "contracts_for", "device_for", "environment", "gate_for", "gated", "hold_switches"]

ARCH_CAPABILITY = {"sm90": (9, 0)}


def gated(arch: str) -> dict[str, bool]:
    """Every function computed here on an arch, and whether a gate lies beside its kernel."""
    return {
        name: (registry._ROOT / function.kernel(arch).folder / "gate.py").is_file()
        for name, function in sorted(registry.FUNCTIONS.items())
        if arch in function.arch
    }


def gate_for(function: str, arch: str) -> Gate:
    """The gate of a function on an arch; raises `GateError` where there is none, `DomainError` for an unknown function."""
    if function not in registry.FUNCTIONS or not gated(arch).get(function):
        have = ", ".join(name for name, there in gated(arch).items() if there)
        raise GateError(f"{function} on {arch}", "a gate.py beside its kernel", "none", f"there are {have}")
    folder = registry.FUNCTIONS[function].kernel(arch).folder
    gate: Gate = import_module(f"isoexec.kernels.{folder.replace('/', '.')}.gate").GATE
    if (gate.function, gate.arch) != (function, arch):
        raise GateError(
            f"{folder}/gate.py", f"{function} on {arch}", f"{gate.function} on {gate.arch}", "mend its GATE"
        )
    return gate


def contracts_for(arch: str, more: Sequence[Path | str] = ()) -> list[Contract]:
    """The shipped contracts of an arch, and others by path or shipped name; raises `ContractError` for what is no contract."""
    shipped = sorted(library().glob("*.yaml"))
    others = [Path(one) if Path(one).exists() else library(str(one)) for one in more]
    found = {path.resolve(): _loaded(path, path.stat().st_mtime_ns) for path in [*shipped, *others]}
    return [contract for contract in found.values() if contract.arch == arch]


@cache
def _loaded(path: Path, written: int) -> Contract:
    del written  # a file that was written again is read again
    return Contract.load(path)


def constants_of(function: str, contracts: Iterable[Contract]) -> list[dict[str, Value]]:
    """The distinct sets of constants under which contracts bind a function, in canonical order."""
    bound = {
        encode(dict(binding.constants)): dict(binding.constants)
        for contract in contracts
        for binding in contract.composition
        if binding.function == function
    }
    for constants in bound.values():
        registry.check_constants(function, constants)
    return [bound[name] for name in sorted(bound)]


def device_for(arch: str) -> torch.device:
    """Where gates of an arch run; raises `GateError` where this machine has none."""
    if arch == "cpu":
        return torch.device("cpu")
    wanted = ARCH_CAPABILITY[arch]
    found = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if found != wanted:
        here = "no GPU" if found is None else f"compute capability {found[0]}.{found[1]}"
        raise GateError(
            arch, f"a GPU of compute capability {wanted[0]}.{wanted[1]}", here, "run these gates on one"
        )
    return torch.device("cuda", torch.cuda.current_device())


def environment(arch: str) -> dict[str, str]:
    """What of this process a record of the arch names: versions, build, and the switches that contracts of the arch claim."""
    build = torch.__config__.show()
    found = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
    }
    if arch == "cpu":
        blas = re.search(r"(oneAPI Math Kernel Library|OpenBLAS|MKL) Version ([\w.]+)", build)
        onednn = re.search(r"MKL-DNN v([\w.]+)", build)
        found |= {
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "blas": blas.group(0) if blas else "unknown",
            "onednn": onednn.group(1) if onednn else "unknown",
        }
        held = switches.read()
        found["float32_products"] = str(held["float32_products"])
        found |= {f"switches.{name}": str(held.get(name)) for name in sorted(_claimed(arch))}
    else:
        import triton

        from isoexec.kernels.providers.versions import cublaslt_version

        found |= {
            "gpu": torch.cuda.get_device_name(),
            "cublaslt": cublaslt_version().removeprefix("cublasLt "),
            "cuda": str(torch.version.cuda),
            "triton": triton.__version__,
        }
    return found


def _claimed(arch: str) -> dict[str, Value]:
    return {
        name: value
        for contract in contracts_for(arch)
        for name, value in contract.claims.environment.switches.items()
    }


def hold_switches(arch: str) -> None:
    """Raise `GateError` where a switch of this process is not as the contracts of the arch claim it.

    Gates of a GPU set the switches of the libraries they run, and put them back: nothing is held for them here.
    """
    held = switches.read()
    for name, wanted in sorted(_claimed(arch).items()) if arch == "cpu" else ():
        if held.get(name) != wanted:
            raise GateError(
                f"switch {name}",
                f"{wanted}, as the contracts of {arch} claim",
                str(held.get(name, "unknown")),
                "set it, or unset what sets it",
            )
