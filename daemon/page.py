# SPDX-License-Identifier: Apache-2.0
"""The status page: plain HTML and inline SVG, no script, nothing loaded from anywhere."""

from __future__ import annotations

import html
import math
import time
from collections.abc import Sequence
from typing import Any

from isoexec.contracts.window import UNPAIRED_REASONS

__all__ = ["plot", "run_page", "runs_page"]

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1b1f24;background:#fff;margin:2rem auto;max-width:62rem;padding:0 1rem}
h1{font-size:1.35rem;font-weight:600}h2{font-size:1.05rem;font-weight:600;margin:2rem 0 .4rem}
a{color:#0b57a4;text-decoration:none}a:hover{text-decoration:underline}
table{border-collapse:collapse;width:100%}th{text-align:left;font-weight:500;color:#57606a}
th,td{padding:.3rem .8rem .3rem 0;border-bottom:1px solid #e4e8ec;vertical-align:top}
td.n{font-variant-numeric:tabular-nums;white-space:nowrap}
.pass{color:#1a7f37}.violation,.halt{color:#b3261e;font-weight:600}.unknown{color:#8a6100}
.note{color:#57606a}.halted{border-left:4px solid #b3261e;padding:.4rem .9rem;background:#fdf3f2}
svg{width:100%;height:auto;display:block}svg text{font:11px system-ui,sans-serif;fill:#57606a}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(27rem,1fr));gap:1.2rem 2rem}
"""
_COLOURS = ("#0b57a4", "#c05621", "#1a7f37", "#7d3c98", "#57606a", "#b3261e", "#0e7c86")
_WIDTH, _HEIGHT = 460, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 8, 8, 22

Series = Sequence[tuple[str, Sequence[tuple[float, float]]]]


def _shell(title: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="5">'
        f'<meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style><body>{body}</body></html>"
    )


def _number(value: object) -> str:
    try:
        number = float(str(value))
    except ValueError:
        return "-"
    if math.isnan(number):
        return "-"
    return f"{number:.4g}"


def _outcome(outcome: str) -> str:
    return f'<span class="{html.escape(outcome)}">{html.escape(outcome)}</span>'


def _since(unix: object) -> str:
    if not isinstance(unix, int | float):
        return "never"
    seconds = max(time.time() - unix, 0.0)
    for size, name in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {name} ago"
    return f"{seconds:.0f} s ago"


def runs_page(runs: Sequence[dict[str, Any]]) -> str:
    """List every run with its last verdict."""
    if not runs:
        return _shell("IsoExec", "<h1>IsoExec</h1><p class=note>No run has said hello yet.")
    rows = []
    for run in runs:
        name = html.escape(str(run["run"]))
        pair = (run.get("pairs") or [None])[0]
        share = f"{100 * pair['bitwise_equal'] / pair['tokens']:.4g} %" if pair else "-"
        state = '<span class="halt">halted</span>' if run["halted"] else _outcome(str(run["outcome"]))
        mode = "monitor" if run.get("monitor_only") else "contract"
        step = run.get("step")
        rows.append(
            f'<tr><td><a href="/runs/{name}">{name}</a><td>{state}<td>{html.escape(str(run.get("regime", "-")))}'
            f"<td>{mode}<td class=n>{'-' if step is None else step}<td class=n>{share}"
            f"<td class=n>{_number(pair['mean_abs_d']) if pair else '-'}<td>{_since(run.get('last_window'))}"
        )
    head = (
        "<tr><th>run<th>verdict<th>regime<th>mode<th>step<th>bitwise equal<th>mean abs d, nats<th>last window"
    )
    return _shell("IsoExec", f"<h1>IsoExec</h1><table>{head}{''.join(rows)}</table>")


def run_page(run: dict[str, Any], windows: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]]) -> str:
    """Show one run: why it stands as it does, plots over steps, its processes and what was done."""
    name = html.escape(str(run["run"]))
    parts = [f'<p><a href="/">all runs</a><h1>{name} {_outcome(run["outcome"])}</h1>']
    mode = "monitor only" if run["monitor_only"] else "under contract"
    parts.append(
        f"<p class=note>{html.escape(run['regime'])}, {mode}, {html.escape(run['policy'])}, step "
        f"{'-' if run['step'] is None else run['step']}, weights {_number(run['weight_version'])}, "
        f"started {_since(run['started'])}"
    )
    if run["marker"]:
        marker = run["marker"]
        parts.append(
            f"<div class=halted><b>Halted</b> at step {marker['step']} by rule "
            f"<b>{html.escape(str(marker['rule']))}</b>: {html.escape(str(marker['cause']))}<br>"
            f"<code>isoexec clear {name}</code> lets it start again.</div>"
        )
    parts.append(_failing(run["failing"]))
    parts.append(_unpaired(run["unpaired"]))
    parts.append(f'<div class="plots">{_plots(windows, steps)}</div>')
    parts.append(_worst(run["pairs"]))
    parts.append(_rules(run["rules"], run["mode"], run["verdicts"]))
    parts.append(_processes(run["processes"]))
    parts.append(_actions(run["actions"]))
    return _shell(f"IsoExec {run['run']}", "".join(parts))


def _failing(verdicts: Sequence[dict[str, Any]]) -> str:
    if not verdicts:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(v['rule'])}<td>{_outcome(v['outcome'])}<td>{html.escape(v['action'])}"
        f"<td>{html.escape(v['message'])}"
        for v in verdicts
    )
    return (
        f"<h2>Not passed in the last window</h2><table><tr><th>rule<th>outcome<th>action<th>why{rows}</table>"
    )


def _unpaired(lost: Sequence[dict[str, Any]]) -> str:
    if not lost:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(one['role'])}<td class=n>{one['tokens']}<td>{html.escape(one['reason'])}"
        f"<td>{html.escape(UNPAIRED_REASONS.get(one['reason'], ''))}"
        for one in lost
    )
    head = "<tr><th>side<th>tokens<th>reason<th>why"
    return f"<h2>Tokens of the last window that found no partner</h2><table>{head}{rows}</table>"


def _worst(pairs: Sequence[dict[str, Any]]) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(pair['pair'])}<td>{html.escape(w['by'])}<td>{html.escape(w['label'])}"
        f"<td class=n>{_number(w['mean_abs_d'])}<td class=n>{_number(w['elsewhere'])}"
        f"<td class=n>{w['unequal']} of {w['tokens']}"
        for pair in pairs
        for w in pair.get("worst", ())
    )
    if not rows:
        return ""
    head = "<tr><th>pair<th>by<th>worst<th>mean abs d, nats<th>elsewhere<th>tokens that differ"
    return f"<h2>Where the mismatch is largest</h2><table>{head}{rows}</table>"


def _rules(rules: Sequence[dict[str, Any]], mode: dict[str, Any], verdicts: Sequence[dict[str, Any]]) -> str:
    """What each rule may do now, and who switched the mode of the run when."""
    said = {verdict["rule"]: verdict for verdict in verdicts}
    by = f", set by {html.escape(mode['by'])}" if mode["by"] else ""
    since = f", {_since(mode['time'])}" if mode["time"] else ""
    why = f": {html.escape(mode['reason'])}" if mode["reason"] else ""
    rows = "".join(
        f"<tr><td>{html.escape(rule['rule'])}<td>{html.escape(rule['mode'])}<td>{html.escape(rule['action'])}"
        f"<td>{html.escape(rule['lowered_by'])}"
        f"<td>{_outcome(str(said[rule['rule']]['outcome'])) if rule['rule'] in said else '-'}"
        f"<td class=n>{_number(said.get(rule['rule'], {}).get('value'))}"
        for rule in rules
    )
    head = "<tr><th>rule<th>may now<th>declares<th>lowered by<th>last outcome<th>value"
    return f"<h2>Rules</h2><p class=note>mode {html.escape(mode['mode'])}{by}{since}{why}<table>{head}{rows}</table>"


def _processes(processes: dict[str, dict[str, Any]]) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(source)}<td>{html.escape(str(data.get('role')))}"
        f"<td class=n>{html.escape(str(data.get('place', '-')))}<td>"
        + html.escape(", ".join(f"{k} {v}" for k, v in sorted(data.get("versions", {}).items())))
        for source, data in sorted(processes.items())
    )
    return f"<h2>Processes</h2><table><tr><th>source<th>role<th>in metrics<th>versions{rows}</table>"


def _actions(actions: Sequence[dict[str, Any]]) -> str:
    if not actions:
        return ""
    rows = "".join(
        f"<tr><td>{_since(a['time'])}<td class=n>{a['step']}<td>{html.escape(a['action'])}"
        f"<td>{html.escape(_by(a))}"
        for a in actions
    )
    return f"<h2>What was done</h2><table><tr><th>when<th>step<th>action<th>by{rows}</table>"


def _by(action: dict[str, Any]) -> str:
    if action["action"] == "mode":
        return f"{action.get('mode')} by {action.get('by') or '-'}: {action.get('reason') or '-'}"
    return str(action.get("rule") or action.get("pids") or "")


def _plots(windows: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]]) -> str:
    shares: dict[str, list[tuple[float, float]]] = {}
    means: dict[str, list[tuple[float, float]]] = {}
    for row in windows:
        window = row["window"]
        for pair in window["pairs"]:
            if pair["tokens"]:
                label = ":".join(pair["pair"])
                share = pair["bitwise_equal"] / pair["tokens"]
                shares.setdefault(label, []).append((window["step"], share))
                means.setdefault(label, []).append((window["step"], float(pair["mean_abs_d"])))
    seconds: dict[str, list[tuple[float, float]]] = {}
    for row in steps:
        for phase, value in row.get("seconds", {}).items():
            seconds.setdefault(phase, []).append((row["step"], float(value)))
    return "".join(
        (
            plot("Tokens with the same bits, share", list(shares.items()), top=1.0),
            plot("Mean abs d, nats", list(means.items())),
            plot("Seconds a step", list(seconds.items())),
        )
    )


def plot(title: str, series: Series, *, top: float | None = None) -> str:
    """Draw lines over steps as SVG, from 0 to `top` or to the largest value; points that are not finite are left out."""
    drawn = [(name, [(x, y) for x, y in points if math.isfinite(y)]) for name, points in series]
    drawn = [(name, points) for name, points in drawn if points]
    heading = f"<h2>{html.escape(title)}</h2>"
    if not drawn:
        return f"<div>{heading}<p class=note>nothing seen yet</div>"
    xs = [x for _, points in drawn for x, _ in points]
    low, high = min(xs), max(xs)
    most = top if top is not None else max(y for _, points in drawn for _, y in points)
    most = most if most > 0 else 1.0
    wide, tall = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(x: float, y: float) -> str:
        right = (x - low) / (high - low) if high > low else 0.5
        return f"{_LEFT + right * wide:.1f},{_TOP + (1 - min(y / most, 1.0)) * tall:.1f}"

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(title)}">']
    for share in (0.0, 0.5, 1.0):
        y = _TOP + (1 - share) * tall
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e8ec"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share * most:.3g}</text>'
        )
    for x, anchor in ((low, "start"), (high, "end")) if high > low else ((low, "middle"),):
        left = _LEFT if anchor == "start" else _WIDTH - _RIGHT if anchor == "end" else _LEFT + wide / 2
        parts.append(f'<text x="{left:.0f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">step {x:.0f}</text>')
    keys = []
    for index, (name, points) in enumerate(drawn):
        colour = _COLOURS[index % len(_COLOURS)]
        line = " ".join(at(x, y) for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        end = at(*points[-1]).split(",")
        parts.append(f'<circle cx="{end[0]}" cy="{end[1]}" r="2.6" fill="{colour}"/>')
        keys.append(f'<span style="color:{colour}">{html.escape(name)} {_number(points[-1][1])}</span>')
    parts.append("</svg>")
    return f"<div>{heading}{''.join(parts)}<p class=note>{' &nbsp; '.join(keys)}</div>"
