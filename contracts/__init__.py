# SPDX-License-Identifier: Apache-2.0
"""What a run promises, and whether it kept it. Imports no torch.

The names below are public; each is loaded when it is first used, so that importing one module stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isoexec.contracts.canonical import encode
    from isoexec.contracts.diff import Difference, diff_dicts, render
    from isoexec.contracts.digests import digest_bytes, digest_of
    from isoexec.contracts.errors import (
        ContractError,
        HaltedError,
        HandshakeError,
        InstallError,
        IsoExecError,
        TopologyError,
        WireError,
    )
    from isoexec.contracts.identities import Identities, identities_of
    from isoexec.contracts.lint import Finding, explain, require_clean
    from isoexec.contracts.pinning import pin
    from isoexec.contracts.schema import Contract, RegionBinding, json_schema, library
    from isoexec.contracts.topology import check_topology

__all__ = [
    "Contract",
    "ContractError",
    "Difference",
    "Finding",
    "HaltedError",
    "HandshakeError",
    "Identities",
    "InstallError",
    "IsoExecError",
    "RegionBinding",
    "TopologyError",
    "WireError",
    "check_topology",
    "diff_dicts",
    "digest_bytes",
    "digest_of",
    "encode",
    "explain",
    "identities_of",
    "json_schema",
    "library",
    "pin",
    "render",
    "require_clean",
]

# `diff` and `lint` are also the names of modules: import those functions from their modules
_HOME = {
    "canonical": ("encode",),
    "diff": ("Difference", "diff_dicts", "render"),
    "digests": ("digest_bytes", "digest_of"),
    "errors": (
        "ContractError",
        "HaltedError",
        "HandshakeError",
        "InstallError",
        "IsoExecError",
        "TopologyError",
        "WireError",
    ),
    "identities": ("Identities", "identities_of"),
    "lint": ("Finding", "explain", "require_clean"),
    "pinning": ("pin",),
    "schema": ("Contract", "RegionBinding", "json_schema", "library"),
    "topology": ("check_topology",),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> object:
    module = _MODULE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)
