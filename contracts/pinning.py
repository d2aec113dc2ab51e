# SPDX-License-Identifier: Apache-2.0
"""Rewrites the source digests of a contract file in place, touching nothing but those digests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from isoexec.contracts.digests import is_digest
from isoexec.contracts.errors import ContractError
from isoexec.contracts.loading import Span, parse, read
from isoexec.contracts.schema import Contract

__all__ = ["pin", "pinned_text"]


def pinned_text(text: str, sources: Mapping[str, str], *, path: str = "") -> str:
    """Return the text with the `source` of every own kernel of the named functions replaced.

    `sources` is {function: digest}. Raises ContractError for a function without an own kernel in the file, for
    what is no digest, and for a text that is not a contract.
    """
    document = parse(text, path=path)
    contract = Contract.from_document(document)
    for function, digest in sources.items():
        if not is_digest(digest):
            raise ContractError(
                f"{digest!r} is not a digest", path=path, field=function, fix="give sha256:<hex>"
            )
    edits: list[tuple[Span, str]] = []
    done = set()
    for index, provider in enumerate(contract.providers):
        if provider.kind == "kernel" and provider.function in sources:
            edits.append((document.spans["providers", index, "source"], sources[provider.function]))
            done.add(provider.function)
    missing = sorted(set(sources) - done)
    if missing:
        raise ContractError(
            f"no own kernel provides {', '.join(missing)}",
            path=path,
            field="providers",
            fix="add the provider, or drop the pair",
        )
    for span, digest in sorted(edits, key=lambda edit: edit[0].start, reverse=True):
        text = text[: span.start] + digest + text[span.end :]
    return text


def pin(path: Path, sources: Mapping[str, str]) -> list[str]:
    """Rewrite a file atomically; return the functions whose digest changed, sorted."""
    before = read(path)
    after = pinned_text(before.text, sources, path=str(path))
    old = {p.function: p.source for p in Contract.from_document(before).providers if p.kind == "kernel"}
    if after != before.text:
        _replace(path, after)
    return sorted(function for function, digest in sources.items() if old.get(function) != digest)


def _replace(path: Path, text: str) -> None:
    target = path.resolve()
    mode = target.stat().st_mode
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as handle:
            handle.write(text)
        Path(name).chmod(mode & 0o777)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
