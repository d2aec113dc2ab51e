# SPDX-License-Identifier: Apache-2.0
"""A real vLLM server (CPU, a tiny model) that generates, and is paused as a halt escalates to it; its trainers heed nothing."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from stage import Row, Stage, StageError, end, free_port, until  # type: ignore[import-not-found]  # beside this file

__all__ = ["CASES", "run_case"]

PAUSE = "vLLM server, POST /pause"
CASES = {PAUSE: "SIGTERM to the ranks, then /pause of the server"}
TOKENS = 400
ENV = {
    "VLLM_SERVER_DEV_MODE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_PLUGINS": "",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
}


class Load:
    """Asks for sequence after sequence, and notes when each ended."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stop = threading.Event()
        self.done: list[float] = []
        self.answers: list[str] = []
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        while not self._stop.is_set():
            try:
                body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0,
                        "return_token_ids": True}  # fmt: skip
                status, text = post(self._port, "/v1/completions", body, timeout=300)
            except OSError:
                return
            if status != 200:
                self.answers.append(f"{status} {text[:200]}")
                return
            choice = json.loads(text)["choices"][0]
            self.done.append(time.time())
            self.answers.append(f"{len(choice.get('token_ids') or ())} tokens, {choice['finish_reason']}")

    def stop(self) -> None:
        self._stop.set()


def post(port: int, path: str, body: dict[str, object], timeout: float = 60) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("POST", path, body=json.dumps(body), headers={"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except OSError:
        return 0, ""
    finally:
        connection.close()


def run_case(name: str, folder: Path) -> Row:
    """Run one case in an empty folder. Raises StageError where its parts do not come up."""
    from isoexec.adapters.demo.tiny import make_qwen3

    model = make_qwen3(folder / "model", seed=7)
    port = free_port()
    log = folder / "vllm.log"
    with log.open("wb") as said:
        server = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name",
             "m", "--host", "127.0.0.1", "--port", str(port), "--skip-tokenizer-init", "--enforce-eager",
             "--max-model-len", "512", "--dtype", "bfloat16"],
            stdout=said, stderr=said, env=os.environ | ENV,
        )  # fmt: skip
    stage = Stage(
        folder,
        cooperative_seconds=2,
        terminate_seconds=2,
        runtime_seconds=15,
        runtimes=[{"kind": "vllm", "address": f"http://127.0.0.1:{port}"}],
    )
    load = None
    try:
        stage.start_daemon()
        stage.start_engine()
        stage.fork_ranks("deaf", "immune")
        until(lambda: get(port, "/health")[0] == 200 or _gone(server, log), "the server", 400, 0.5)
        load = Load(port)
        until(lambda: len(load.answers) >= 2, "two sequences", 180)
        if not load.done:
            raise StageError(f"the server does not generate: {load.answers}")
        stage.running(1)
        pids = stage.pids()
        at = stage.verdict()
        until(lambda: "true" in get(port, "/is_paused")[1].lower(), "the pause", 60, 0.05)
        paused = time.time()
        stopped = stage.stopped(pids, 60)
        time.sleep(5.0)
        after = [when for when in load.done if when > paused + 0.5]
        stage.notes.append(
            f"paused {paused - at:.1f} s after the verdict, {len(after)} sequences end in 5 s after it; last {load.answers[-1]}"
        )
        row = stage.row(name, CASES[name], at, stopped, ends=True, fence=False)
        if after:
            row.wrong.append(f"{len(after)} sequences ended while paused")
        count = len(load.done)
        status, _ = post(port, "/resume", {})
        until(lambda: len(load.done) > count, "generation after /resume", 60)
        row.happened += f"; generates again after /resume ({status})"
        stage.clear(row)
    finally:
        if load is not None:
            load.stop()
        stage.close()
        end(server, 30)
    return row


def _gone(server: subprocess.Popen[bytes], log: Path) -> bool:
    if server.poll() is not None:
        raise StageError(log.read_text()[-1500:])
    return False
