# SPDX-License-Identifier: Apache-2.0
"""Asks the runtime that started a job to stop it: Ray, Slurm, Kubernetes or a vLLM server, only where settings name one.

No shell and no SDK: `scancel` and `kubectl` are run as they are installed, with the daemon's own rights; Ray and vLLM are
asked over HTTP, with a token where one is set. What a runtime answers is kept, and it is given `timeout_seconds` at most to
answer.
"""

from __future__ import annotations

import asyncio
import fnmatch
import http.client
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, urlsplit

from isoexec.contracts.errors import IsoExecError
from isoexec.contracts.tokens import TokenError, read_token

__all__ = ["KINDS", "Runtime", "RuntimeSettingError"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,252}")  # never an option of a command, never a path
KINDS: Mapping[str, tuple[str, ...]] = {
    "slurm": ("job",),
    "ray": ("job", "address"),
    "kubernetes": ("job", "namespace"),
    "vllm": ("address",),
}
"""What each kind of runtime must be told."""
_OVER_HTTP = ("ray", "vllm")


class RuntimeSettingError(IsoExecError):
    """An entry of `escalation.runtimes` that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """One runtime of the runs whose name matches `run` (a shell pattern).

    slurm: ``scancel JOB``. ray: ``POST ADDRESS/api/jobs/JOB/stop``, JOB a submission id. kubernetes: the Job's
    ``spec.suspend`` is set, which ends its pods, and read back: a server that has no such field takes the patch and drops it.
    vllm: ``POST ADDRESS/pause``, which stops generation and keeps the server. token: file (mode 0600) of the token that ray
    or vllm asks for, read each time it is used.
    """

    kind: str
    run: str = "*"
    job: str = ""
    address: str = ""
    namespace: str = ""
    token: str = ""
    timeout_seconds: float = 10.0

    @classmethod
    def of(cls, values: Any, where: str) -> Self:
        """Check one map of settings. Raises RuntimeSettingError naming the field."""
        if not isinstance(values, Mapping):
            raise RuntimeSettingError(f"{where}: wanted a map with kind, found {values!r}")
        known = {item.name for item in fields(cls)}
        if unknown := sorted(set(map(str, values)) - known):
            raise RuntimeSettingError(
                f"{where}: unknown setting {unknown[0]!r}; known: {', '.join(sorted(known))}"
            )
        kind = str(values.get("kind"))
        if kind not in KINDS:
            raise RuntimeSettingError(f"{where}: kind: wanted one of {', '.join(KINDS)}, found {kind!r}")
        given = {key: str(value) for key, value in values.items() if key != "timeout_seconds"}
        for name in KINDS[kind]:
            if not given.get(name):
                raise RuntimeSettingError(f"{where}: {kind} needs {name}")
        if given.get("token"):
            if kind not in _OVER_HTTP:
                raise RuntimeSettingError(f"{where}: token: {kind} is asked by its command and takes none")
            given["token"] = str(Path(given["token"]).expanduser())
            try:
                read_token(Path(given["token"]))
            except TokenError as error:
                raise RuntimeSettingError(f"{where}: token: {error}") from error
        for name in ("job", "namespace"):
            if given.get(name) and _NAME.fullmatch(given[name]) is None:
                raise RuntimeSettingError(
                    f"{where}: {name}: wanted letters, digits, '.', '_', ':' and '-', found {given[name]!r}"
                )
        if given.get("address"):
            parts = urlsplit(given["address"])
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise RuntimeSettingError(
                    f"{where}: address: wanted http://HOST:PORT, found {given['address']!r}"
                )
        patience = values.get("timeout_seconds", 10.0)
        if isinstance(patience, bool) or not isinstance(patience, int | float) or not 0 < patience <= 600:
            raise RuntimeSettingError(f"{where}: timeout_seconds: wanted 0 to 600, found {patience!r}")
        return cls(**given, timeout_seconds=float(patience))

    def serves(self, run: str) -> bool:
        return fnmatch.fnmatchcase(run, self.run)

    @property
    def name(self) -> str:
        return f"{self.kind} {self.job or self.address}"

    async def stop(self) -> str:
        """Ask once and give the answer in a line, never raises: it starts with ``asked``, with ``refused`` where the runtime
        said that it will not, or with ``failed`` where what it does is not known.
        """
        try:
            async with asyncio.timeout(self.timeout_seconds):
                if self.kind == "slurm":
                    return await _command("scancel", self.job)
                if self.kind == "kubernetes":
                    return await self._suspend()
                path = f"/api/jobs/{quote(self.job, safe='')}/stop" if self.kind == "ray" else "/pause"
                token = read_token(Path(self.token)).decode("latin-1") if self.token else ""
                return await asyncio.to_thread(_post, self.address, path, token, self.timeout_seconds)
        except TimeoutError:
            return f"failed: no answer within {self.timeout_seconds:g} s"
        except (OSError, http.client.HTTPException, ValueError, TokenError) as error:
            return f"failed: {error}"

    async def _suspend(self) -> str:
        said = await _command(
            "kubectl", "--namespace", self.namespace, "patch", "job", self.job,
            "--type=merge", "--patch", '{"spec":{"suspend":true}}', "--output=jsonpath={.spec.suspend}",
        )  # fmt: skip
        if said == "asked: true":
            return f"asked: job {self.job} has spec.suspend true"
        if not said.startswith("asked: "):
            return said
        found = said.removeprefix("asked: ") or "nothing"
        return f"refused: wanted spec.suspend true of job {self.job}, found {found}; Kubernetes has it from 1.21 on"


async def _command(*argv: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said, _ = await process.communicate()
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    text = said.decode(errors="replace").strip()[:500]
    return f"asked: {text}" if process.returncode == 0 else f"refused: exit {process.returncode}: {text}"


def _post(address: str, path: str, token: str, timeout: float) -> str:
    parts = urlsplit(address)
    headers = {"content-type": "application/json"}
    if token:
        headers["authorization"] = f"Bearer {token}"
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout)
    try:
        connection.request(
            "POST",
            parts.path.rstrip("/") + path,
            body=json.dumps({}),
            headers=headers,
        )
        answer = connection.getresponse()
        text = answer.read(2000).decode(errors="replace").strip()[:500]
    finally:
        connection.close()
    return f"asked: {answer.status} {text}" if answer.status < 300 else f"refused: {answer.status} {text}"
