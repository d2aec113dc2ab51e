# SPDX-License-Identifier: Apache-2.0
"""What the soaks share: the peer of the daemon's own tests, and a daemon in a process of its own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

__all__ = ["peer_class", "start_daemon"]


def peer_class() -> Any:
    """The peer of the daemon's own tests."""
    path = Path(__file__).parents[1] / "daemon" / "conftest.py"
    spec = importlib.util.spec_from_file_location("isoexec_daemon_peers", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Peer


def start_daemon(
    state_dir: Path, settings: dict[str, Any], *, log: Path, before: Sequence[str] = (), **options: Any
) -> tuple[subprocess.Popen[str], str]:
    """Start a daemon and give it with its address once it answers; `before` goes before its command line."""
    state_dir.mkdir(parents=True, exist_ok=True)
    config = log.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(settings))
    code = "import sys; from isoexec.daemon.cli import run; sys.exit(run())"
    with log.open("ab") as said:
        process = subprocess.Popen(
            [*before, sys.executable, "-P", "-c", code, "--state-dir", str(state_dir), "--http", "127.0.0.1:0",
             "--log", "json", "--config", str(config)],
            stdout=subprocess.PIPE, stderr=said, text=True, **options,
        )  # fmt: skip
    line = process.stdout.readline() if process.stdout else ""
    if not line.startswith("isoexec daemon: http"):
        process.wait(30)
        raise RuntimeError(f"no daemon: {line!r} {log.read_text()[-2000:]}")
    return process, line.removeprefix("isoexec daemon: ").split(",")[0]
