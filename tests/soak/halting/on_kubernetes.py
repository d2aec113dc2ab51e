# SPDX-License-Identifier: Apache-2.0
"""The real kubectl against an API that this script stands in for: Job objects kept in memory, no controller and no pods.

So it shows what is sent and what is made of the answer, not that pods end.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from stage import Row, StageError  # type: ignore[import-not-found]  # beside this file

from isoexec.daemon.runtimes import Runtime

__all__ = ["CASES", "run_case"]

NEW, OLD = "kubectl, API with spec.suspend", "kubectl, API without spec.suspend (before 1.21)"
GONE = "kubectl, no such Job"
CASES = {
    NEW: "suspend the Job",
    OLD: "suspend the Job; the API drops the field",
    GONE: "suspend a Job that is not there",
}
CONFIG = """\
apiVersion: v1
kind: Config
current-context: c
clusters: [{{name: c, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
contexts: [{{name: c, context: {{cluster: c, user: u}}}}]
users: [{{name: u, user: {{}}}}]
"""


class Api(ThreadingHTTPServer):
    """`jobs` by path; `suspends`: whether the API knows spec.suspend."""

    daemon_threads = True
    jobs: dict[str, dict[str, Any]]
    suspends = True


class Handler(BaseHTTPRequestHandler):
    server: Api

    def do_GET(self) -> None:
        group = {"name": "batch", "versions": [{"groupVersion": "batch/v1", "version": "v1"}]}
        resource = {
            "name": "jobs", "singularName": "job", "namespaced": True, "kind": "Job", "verbs": ["get", "patch"],
        }  # fmt: skip
        known: dict[str, Any] = {
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]},
            "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": []},
            "/apis/batch/v1": {
                "kind": "APIResourceList",
                "groupVersion": "batch/v1",
                "resources": [resource],
            },
        }
        path = self.path.partition("?")[0]
        self._answer(known.get(path) or self.server.jobs.get(path))

    def do_PATCH(self) -> None:
        job = self.server.jobs.get(self.path.partition("?")[0])
        patch = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if job is not None:
            given = {k: v for k, v in patch["spec"].items() if self.server.suspends or k != "suspend"}
            job["spec"] |= given
        self._answer(job)

    def _answer(self, found: Any) -> None:
        missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404,
                   "message": "jobs.batch not found"}  # fmt: skip
        raw = json.dumps(found or missing).encode()
        self.send_response(200 if found else 404)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: Any) -> None:
        pass


def run_case(name: str, folder: Path) -> Row:
    """Run one case in an empty folder. Raises StageError where there is no kubectl."""
    if shutil.which("kubectl") is None:
        raise StageError("kubectl is not there")
    path = "/apis/batch/v1/namespaces/rl/jobs/train"
    api = Api(("127.0.0.1", 0), Handler)
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "train", "namespace": "rl"},
        "spec": {},
    }
    api.jobs, api.suspends = {path: job} if name != GONE else {}, name != OLD
    thread = threading.Thread(target=api.serve_forever, daemon=True)
    thread.start()
    config = folder / "kubeconfig"
    config.write_text(CONFIG.format(port=api.server_port))
    before = dict(os.environ)
    os.environ |= {"KUBECONFIG": str(config), "HOME": str(folder)}
    try:
        version = subprocess.run(["kubectl", "version", "--client"], capture_output=True, text=True).stdout
        runtime = Runtime.of(
            {"kind": "kubernetes", "job": "train", "namespace": "rl", "timeout_seconds": 60}, "soak"
        )
        began = time.monotonic()
        said = asyncio.run(runtime.stop())
        took = time.monotonic() - began
    finally:
        os.environ.clear()
        os.environ.update(before)
        api.shutdown()
        api.server_close()
    row = Row(
        case=name,
        asked=CASES[name],
        happened=f"{version.splitlines()[0]}; stand-in API; answer in {took:.1f} s: {said}",
        checkpoint="no job runs",
    )
    if said.startswith("asked: ") != (name == NEW):
        row.wrong.append(said)
    if name == NEW and job["spec"] != {"suspend": True}:
        row.wrong.append(f"the Job has {job['spec']}")
    return row
