# SPDX-License-Identifier: Apache-2.0
"""Rewrites the source digests and the discharges of a contract file in place, touching nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from isoexec.contracts.digests import is_digest
from isoexec.contracts.errors import ContractError
from isoexec.contracts.evidence import put_file
from isoexec.contracts.loading import Document, Keys, parse, read
from isoexec.contracts.parts import Discharge
from isoexec.contracts.schema import Contract

__all__ = ["pin", "pinned_text"]

Edit = tuple[int, int, str]


def pinned_text(
    text: str, sources: Mapping[str, str], evidence: Mapping[str, str] | None = None, *, path: str = ""
) -> str:
    """Return the text with digests replaced.

    `sources` is {function: digest}, the `source` of its own kernels. `evidence` is {function: digest} for the discharges of
    the function's bindings and own kernels, or {"function|provider": digest} for one provider's, which wins.
    Raises ContractError for a name the file does not have, for what is no digest, and for a text that is not a contract.
    """
    document = parse(text, path=path)
    contract = Contract.from_document(document)
    wanted = {**sources, **(evidence or {})}
    for name, digest in wanted.items():
        if not is_digest(digest):
            raise ContractError(f"{digest!r} is not a digest", path=path, field=name, fix="give sha256:<hex>")
    edits = [*_sources(document, contract, sources), *_discharges(document, contract, evidence or {})]
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def pin(path: Path, sources: Mapping[str, str], evidence: Mapping[str, str] | None = None) -> list[str]:
    """Rewrite a file so that no reader sees half of it; return the functions whose digests changed, sorted."""
    before = read(path)
    after = pinned_text(before.text, sources, evidence, path=str(path))
    old, new = Contract.from_document(before), Contract.from_document(parse(after, path=str(path)))
    if after != before.text:
        mode = path.resolve().stat().st_mode & 0o777
        put_file(path.resolve().parent, path.resolve().name, after.encode("utf-8"), mode=mode)
    changed = {one.function for one, other in zip(old.providers, new.providers, strict=True) if one != other}
    changed |= {
        one.function for one, other in zip(old.composition, new.composition, strict=True) if one != other
    }
    return sorted(changed)


def _sources(document: Document, contract: Contract, sources: Mapping[str, str]) -> Iterator[Edit]:
    done = set()
    for index, provider in enumerate(contract.providers):
        if provider.kind == "kernel" and provider.function in sources:
            span = document.spans["providers", index, "source"]
            yield span.start, span.end, sources[provider.function]
            done.add(provider.function)
    _all_used(document.path, set(sources) - done, "no own kernel provides")


def _discharges(document: Document, contract: Contract, evidence: Mapping[str, str]) -> Iterator[Edit]:
    done = set()
    for index, provider in enumerate(contract.providers):
        # a library is not our kernel: its evidence is its own
        general = (provider.function,) if provider.kind == "kernel" else ()
        names = (f"{provider.function}|{provider.name}", *general)
        name = next((one for one in names if one in evidence), None)
        if name is not None:
            done.add(name)
            yield from _discharge(
                document, ("providers", index, "discharge"), provider.discharge, evidence[name]
            )
    for index, binding in enumerate(contract.composition):
        if binding.function in evidence:
            done.add(binding.function)
            yield from _discharge(
                document, ("composition", index, "discharge"), binding.discharge, evidence[binding.function]
            )
    _all_used(document.path, set(evidence) - done, "nothing is discharged for")


def _discharge(document: Document, keys: Keys, held: Discharge, digest: str) -> Iterator[Edit]:
    kind = document.spans[*keys, "kind"]
    if held.evidence is not None:
        span = document.spans[*keys, "evidence"]
        yield span.start, span.end, digest
        return
    flow = document.text[document.spans[keys].start] == "{"
    column = kind.start - (document.text.rfind("\n", 0, kind.start) + 1)
    line = document.text[kind.start - column : kind.start]
    indent = " " * (len(line) - len(line.lstrip()))
    yield kind.start, kind.end, f"evidence{', ' if flow else chr(10) + indent}evidence: {digest}"


def _all_used(path: str, missing: set[str], words: str) -> None:
    if missing:
        raise ContractError(
            f"{words} {', '.join(sorted(missing))}",
            path=path,
            field="providers",
            fix="add the provider, or drop the pair",
        )
