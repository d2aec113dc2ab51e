# SPDX-License-Identifier: Apache-2.0
"""`isoexec dashboards build | config | push`: generate, point at a daemon, or put into a running Grafana."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from isoexec.dashboards.alerts import RUNBOOK
from isoexec.dashboards.build import GENERATED, build, check, write
from isoexec.dashboards.config import config_files, host_port
from isoexec.dashboards.push import PushError, connect, push

__all__ = ["run"]

TOKEN_VARIABLE = "GRAFANA_TOKEN"  # noqa: S105  # the variable's name, not a token


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="isoexec dashboards", description="Grafana and Prometheus as code.")
    commands = parser.add_subparsers(dest="command", required=True)

    made = commands.add_parser("build", help="write the dashboard, the recording rules and the alerts")
    made.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is out of date")
    made.add_argument("--out", type=Path, default=GENERATED, metavar="DIR")
    made.add_argument(
        "--runbook", default=RUNBOOK, metavar="URL", help="runbook page that the alerts link to"
    )

    config = commands.add_parser("config", help="write files that point Prometheus and Grafana at a daemon")
    config.add_argument(
        "--target", required=True, metavar="HOST:PORT", help="where the daemon serves /metrics"
    )
    config.add_argument("--out", type=Path, default=Path("isoexec-monitoring"), metavar="DIR")
    config.add_argument("--prometheus-url", default="http://127.0.0.1:9090", metavar="URL")
    config.add_argument("--alertmanager", metavar="HOST:PORT")
    config.add_argument("--interval", type=int, default=5, metavar="SECONDS", help="scrape and evaluation")
    config.add_argument("--runbook", default=RUNBOOK, metavar="URL")

    pushed = commands.add_parser("push", help="put the dashboard into a running Grafana (extra: grafana)")
    pushed.add_argument("--grafana-url", required=True, metavar="URL")
    pushed.add_argument("--prometheus-url", default="http://127.0.0.1:9090", metavar="URL")
    pushed.add_argument("--interval", type=int, default=5, metavar="SECONDS", help="scrape interval")
    pushed.epilog = f"The service account token is read from {TOKEN_VARIABLE}."
    return parser


def run(argv: Sequence[str]) -> int:
    """Generate dashboards and alerts, point them at a daemon, or push them into a Grafana.

    Returns 0, 1 for files out of date, 2 for wrong usage. Raises IsoExecError.
    """
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed what is wrong
        return stop.code if isinstance(stop.code, int) else 2
    match args.command:
        case "build":
            return _build(args)
        case "config":
            return _config(args)
        case _:
            return _push(args)


def _build(args: argparse.Namespace) -> int:
    if not args.check:
        for path in write(args.out, build(args.runbook)):
            print(path)
        return 0
    stale = check(args.out, args.runbook)
    for line in stale:
        print(line, file=sys.stderr)
    if stale:
        print("run `isoexec dashboards build` and commit what it writes", file=sys.stderr)
    return 1 if stale else 0


def _config(args: argparse.Namespace) -> int:
    files = config_files(
        target=host_port(args.target),
        out=args.out,
        prometheus_url=args.prometheus_url,
        alertmanager=args.alertmanager,
        interval_seconds=args.interval,
        runbook=args.runbook,
    )
    for path in write(args.out, files):
        print(path)
    print(f"\nprometheus --config.file={args.out / 'prometheus.yml'}")
    print(f"GF_PATHS_PROVISIONING={(args.out / 'grafana/provisioning').resolve()} grafana server")
    return 0


def _push(args: argparse.Namespace) -> int:
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise PushError(f"wanted a Grafana service account token in {TOKEN_VARIABLE}, found none")
    api = connect(args.grafana_url, token)
    for line in push(api, prometheus_url=args.prometheus_url, interval_seconds=args.interval):
        print(line)
    return 0
