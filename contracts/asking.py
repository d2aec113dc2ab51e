# SPDX-License-Identifier: Apache-2.0
"""Asks the daemon of a state directory, as commands on its host do: over the address that it noted there, with what it knows of
the other shards.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from isoexec.contracts.halting import StateDirectory
from isoexec.contracts.tokens import read_token

__all__ = ["ask", "noted_shard", "others_that_halt", "shard_lines"]

_ASK_SECONDS = 3.0


def noted_shard(state: StateDirectory) -> str:
    """Give which shard the daemon of this directory is or was, such as `0/2`; empty for one that is none. Raises OSError."""
    try:
        return state.shard.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""


def ask(state: StateDirectory, path: str) -> dict[str, Any] | None:
    """Give what the daemon answers at a path of its API; None where it does not answer.

    Raises TokenError where the daemon asks for a token whose file cannot be read by who asks here.
    """
    import http.client

    try:
        note = json.loads(state.daemon.read_text(encoding="utf-8"))
        address = str(note["http"]).removeprefix("http://")
        connection = http.client.HTTPConnection(address, timeout=_ASK_SECONDS)
        file = note.get("http_token")
        token = {"Authorization": f"Bearer {read_token(Path(file)).decode('latin-1')}"} if file else {}
        connection.request("GET", path, headers=token)
        answer = connection.getresponse()
        found = json.loads(answer.read()) if answer.status == 200 else None
        connection.close()
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return None
    return found if isinstance(found, dict) else None


def others_that_halt(shards: Mapping[str, Any], run: str) -> Iterator[str]:
    """Say of each shard but the one asked that it keeps a run from starting, or that this is not known.

    `shards` is what the daemon's API says of them.
    """
    for word in shards["words"]:
        name = f"shard {word['shard']} of {shards['count']}"
        if word["shard"] == shards["shard"]:
            continue
        if not word["heard"]:
            yield f"{name} is not heard: whether it halts {run} is unknown; run `isoexec clear {run}` on its host"
        elif run in word["halted"]:
            yield f"{name} halts {run}, {word['halted'][run]}; run `isoexec clear {run}` on its host"


def shard_lines(shards: Mapping[str, Any], run: str) -> Iterator[str]:
    """Tell how a run stands with all shards together, and with each."""
    count, joint = shards["count"], shards["verdicts"].get(run)
    yield f"all {count} shards: " + (_standing(joint) if joint else "no verdict, no shard watches it now")
    for word in shards["words"]:
        here = ", asked here" if word["shard"] == shards["shard"] else ""
        yield f"shard {word['shard']} of {count}{here}: {_word(word, run)}"


def _word(word: Mapping[str, Any], run: str) -> str:
    said = word["runs"].get(run)
    halted = f"; halted {word['halted'][run]}" if run in word["halted"] else ""
    if word["silent_seconds"] is None:
        return "unknown, it was never heard"
    if not word["heard"]:
        before = f", {_standing(said)} before" if said else ""
        return f"unknown, silent for {word['silent_seconds']:.0f} s{before}{halted}"
    return (_standing(said) if said else "does not watch it now") + halted


def _standing(said: Mapping[str, Any]) -> str:
    rule = f" by {said['rule']}" if said["rule"] else ""
    cause = f": {said['cause']}" if said["cause"] else ""
    return f"{str(said['state']).lower()}{rule}{cause}"
