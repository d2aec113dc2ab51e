# SPDX-License-Identifier: Apache-2.0
"""Three commands: `isoexec daemon` watches, `isoexec status` tells, `isoexec check` judges a journal again."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isoexec.contracts.asking import ask, noted_shard, shard_lines
from isoexec.contracts.errors import IsoExecError
from isoexec.contracts.halting import StateDirectory, default_state_dir
from isoexec.contracts.rules import load_rules
from isoexec.contracts.verdict import RuleHistory, Verdict, evaluate
from isoexec.contracts.window import UNPAIRED_REASONS, Window
from isoexec.daemon.config import Config, ConfigError
from isoexec.daemon.journal import Journal, JournalError
from isoexec.daemon.memory import keep_freed
from isoexec.daemon.views import runs_view

__all__ = ["check", "run", "status"]


def run(argv: Sequence[str] | None = None) -> int:
    """Run the daemon until SIGTERM or SIGINT; 0 on a clean stop, 1 when it cannot start."""
    parser = argparse.ArgumentParser(prog="isoexec daemon", description="Watch runs from beside the job.")
    parser.add_argument("--state-dir", type=Path, default=None, help="default: ISOEXEC_STATE_DIR")
    parser.add_argument(
        "--http", default=None, metavar="HOST:PORT", help="default 127.0.0.1:9461; port 0: any"
    )
    parser.add_argument(
        "--tcp", default=None, metavar="HOST:PORT", help="hear probes of other hosts too; needs --tcp-token"
    )
    parser.add_argument("--tcp-token", default=None, metavar="FILE", help="token of those probes, mode 0600")
    parser.add_argument(
        "--nats",
        default=None,
        metavar="URL",
        help="nats://HOST:PORT/NAME: be a shard behind it; credentials in --config",
    )
    parser.add_argument("--shard", default=None, metavar="I/N", help="which of how many shards, from 0")
    parser.add_argument("--log", choices=("json", "console"), default=None)
    parser.add_argument("--config", type=Path, default=None, help="YAML file of settings; flags win")
    chosen = parser.parse_args(argv)
    # imported here: `status` and `check` need no web server
    from isoexec.daemon.running import log_as

    try:
        host, port = _address(chosen.http, "--http")
        tcp_host, tcp_port = _address(chosen.tcp, "--tcp")
        shard, shards = _share(chosen.shard)
        config = Config.load(
            chosen.config,
            log=chosen.log,
            http_host=host,
            http_port=port,
            tcp_host=tcp_host,
            tcp_port=tcp_port,
            tcp_token=chosen.tcp_token,
            nats=chosen.nats,
            shard=shard,
            shards=shards,
            **_state(chosen),
        )
        log_as(config.log)
        keep_freed()
        return asyncio.run(_serve(config))
    except IsoExecError as error:
        print(f"isoexec daemon: {error}", file=sys.stderr)
    except OSError as error:
        print(f"isoexec daemon: cannot start: {error}", file=sys.stderr)
    return 1


def _state(chosen: argparse.Namespace) -> dict[str, Any]:
    if chosen.state_dir is not None:
        return {"state_dir": chosen.state_dir}
    # a settings file may name the directory; the environment is what is left
    named = chosen.config is not None and "state_dir" in _settings(chosen.config)
    return {} if named else {"state_dir": default_state_dir()}


def _settings(path: Path) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _address(text: str | None, flag: str) -> tuple[str | None, int | None]:
    if text is None:
        return None, None
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"{flag}: wanted HOST:PORT, found {text!r}")
    return host.strip("[]"), int(port)


def _share(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    shard, _, shards = text.partition("/")
    if not shard.isdecimal() or not shards.isdecimal():
        raise ConfigError(f"--shard: wanted I/N, such as 0/4, found {text!r}")
    return int(shard), int(shards)


async def _serve(config: Config) -> int:
    from isoexec.daemon.running import Running

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    running = await Running.start(config)
    print(f"isoexec daemon: {running.address}, state in {config.state_dir}", flush=True)
    well = await running.wait(stop)
    await running.close()
    return 0 if well else 1


def status(argv: Sequence[str] | None = None) -> int:
    """Tell how runs stand; 0 when none is halted or in violation, 1 when one is, 2 when there is nothing to read."""
    parser = argparse.ArgumentParser(prog="isoexec status", description="Tell how runs stand.")
    parser.add_argument("run", nargs="?", help="only this run")
    parser.add_argument("--state-dir", type=Path, default=None, help="default: ISOEXEC_STATE_DIR")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(argv)
    state = StateDirectory(chosen.state_dir or default_state_dir())
    answer = ask(state, "/api/v1/runs")
    alive = answer is not None
    shards = answer.get("shards") if answer is not None else None
    if answer is not None:
        rows = answer["runs"]
        rows += [{"run": run, "elsewhere": True} for run in _only_elsewhere(rows, shards)]
    else:
        try:
            journal = Journal.open(state.journal)
        except JournalError as error:
            print(f"isoexec status: the daemon does not answer, and {error}", file=sys.stderr)
            return 2
        rows = runs_view(state, journal)
        journal.close()
    if chosen.run is not None:
        rows = [row for row in rows if row["run"] == chosen.run]
        if not rows:
            print(f"isoexec status: no run {chosen.run!r} was ever watched here", file=sys.stderr)
            return 2
    if chosen.json:
        told = {"daemon": "alive" if alive else "dead", "runs": rows}
        print(json.dumps(told | ({"shards": shards} if shards else {}), indent=1, sort_keys=True))
    else:
        _tell(state, rows, shards, alive=alive)
    bad = any(row.get("halted") or row.get("outcome") == "violation" for row in rows)
    return 1 if bad or any(_halted_elsewhere(row["run"], shards) for row in rows) else 0


def _only_elsewhere(rows: list[dict[str, Any]], shards: dict[str, Any] | None) -> list[str]:
    """Give the runs that other shards speak of and this one has never seen."""
    words = shards["words"] if shards is not None else ()
    said = {run for word in words for run in (*word["runs"], *word["halted"])}
    return sorted(said - {row["run"] for row in rows})


def _halted_elsewhere(run: str, shards: dict[str, Any] | None) -> bool:
    if shards is None:
        return False
    joint = shards["verdicts"].get(run)
    return any(run in word["halted"] for word in shards["words"]) or bool(joint and joint["state"] == "HALT")


def _tell(
    state: StateDirectory, rows: list[dict[str, Any]], shards: dict[str, Any] | None, *, alive: bool
) -> None:
    if not alive:
        print(f"The daemon of {state.path} does not answer; this is what its journal and the markers say.")
        if shard := noted_shard(state):
            print(
                f"It was shard {shard}: what the others say is unknown here; ask `isoexec status` on the host of one."
            )
    if not rows:
        print("No run has said hello yet.")
    for row in rows:
        if row.get("elsewhere"):
            print(f"{row['run']}: never seen by this shard")
            _tell_shards(shards, row["run"])
            continue
        standing = "HALTED" if row["halted"] else row["outcome"]
        age = row.get("last_window")
        when = f", last window {time.time() - age:.0f} s ago" if age else ""
        mode = "monitor" if row.get("monitor_only") else "contract"
        print(f"{row['run']}: {standing} ({row.get('regime', '?')}, {mode}, step {row.get('step')}{when})")
        for pair in row.get("pairs", ()):
            print(
                f"  {pair['pair']}: {pair['bitwise_equal']} of {pair['tokens']} tokens have the same bits, "
                f"mean abs d {float(pair['mean_abs_d']):.3g} nats, max {float(pair['max_abs_d']):.3g}"
            )
            if pair.get("worst"):
                worst = (f"{w['by']} {w['label']} {float(w['mean_abs_d']):.3g}" for w in pair["worst"])
                print(f"    worst by mean abs d: {', '.join(worst)}")
        for lost in row.get("unpaired", ()):
            why = UNPAIRED_REASONS.get(lost["reason"], "")
            print(f"  unpaired, {lost['role']}: {lost['tokens']} tokens, {lost['reason']}: {why}")
        for verdict in row.get("failing", ()):
            print(f"  {verdict['outcome']}: {verdict['message']}")
        _tell_modes(row)
        if row["halted"]:
            marker = row["marker"]
            print(f"  halted at step {marker['step']} by {marker['rule']}: {marker['cause']}")
            print(f"  isoexec clear {row['run']}  lets it start again")
        _tell_shards(shards, row["run"])


def _tell_shards(shards: dict[str, Any] | None, run: str) -> None:
    for line in shard_lines(shards, run) if shards is not None else ():
        print(f"  {line}")


def _tell_modes(row: dict[str, Any]) -> None:
    """Tell what each rule may do now, and who switched the run's mode when."""
    mode = row.get("mode") or {}
    if mode.get("time") or mode.get("mode", "enforce") != "enforce":
        # a bare file says neither who nor when
        local = time.localtime(mode["time"])
        since = time.strftime("%Y-%m-%d %H:%M:%S", local) if mode["time"] else "unknown"
        why = f": {mode['reason']}" if mode["reason"] else ""
        print(f"  mode {mode['mode']} since {since}, by {mode['by'] or 'unknown'}{why}")
    names: dict[str, list[str]] = {}
    for rule in row.get("rules", ()):
        names.setdefault(rule["mode"], []).append(rule["rule"])
    for now in ("halt", "warn", "dryrun", "off"):
        if now in names:
            print(f"  {now}: {', '.join(names[now])}")


def check(argv: Sequence[str] | None = None) -> int:
    """Judge the windows of a journal again; 0 all passed, 1 a violation, 3 unknown but no violation, 2 unreadable."""
    parser = argparse.ArgumentParser(prog="isoexec check", description="Judge a journal again, offline.")
    parser.add_argument("journal", type=Path)
    parser.add_argument("--rules", type=Path, default=None, help="rules file; default: those of each session")
    parser.add_argument("--run", default=None, help="only this run")
    parser.add_argument("--json", action="store_true", help="one verdict a line")
    chosen = parser.parse_args(argv)
    path = chosen.journal / "journal.sqlite" if chosen.journal.is_dir() else chosen.journal
    counts: Counter[str] = Counter()
    try:
        journal = Journal.open(path)
        windows = 0
        for session, name in journal.sessions():
            if chosen.run not in (None, name):
                continue
            history = RuleHistory()
            rules = load_rules(chosen.rules) if chosen.rules is not None else journal.rules(session)
            for row in journal.windows(name, session=session, limit=1 << 40):
                window = Window.from_dict(row["window"])
                verdicts = evaluate(rules, window, history)
                history = history.after(verdicts)
                windows += 1
                for verdict in verdicts:
                    recorded = (verdict.outcome, verdict.action) == ("unknown", "dryrun")
                    counts["only recorded as unknown" if recorded else verdict.outcome] += 1
                    _print(name, verdict, as_json=chosen.json)
        journal.close()
    except IsoExecError as error:
        print(f"isoexec check: {error}", file=sys.stderr)
        return 2
    if not windows:
        print("isoexec check: there is no window to judge", file=sys.stderr)
        return 2
    if not chosen.json:
        print(f"{windows} windows: " + ", ".join(f"{count} {what}" for what, count in counts.items()))
    if counts["violation"]:
        return 1
    return 3 if counts["unknown"] or not counts["pass"] else 0


def _print(run: str, verdict: Verdict, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"run": run, **verdict.to_dict()}, sort_keys=True))
    elif verdict.outcome != "pass" and verdict.action != "dryrun":
        print(f"{run} step {verdict.step}: {verdict.outcome} ({verdict.action}) {verdict.message}")
