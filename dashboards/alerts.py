# SPDX-License-Identifier: Apache-2.0
"""Recording and alert rules as data: metrics from the catalogue, bounds from the default ladder.

Alerts report and never decide: the daemon halts a run by its own rules, faster than a scrape. What breaks the
contract alerts at the next evaluation (`for: 0s`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from isoexec.contracts.rules import LADDER
from isoexec.dashboards.queries import series

__all__ = ["ALERTS", "JOB", "RECORDINGS", "RUNBOOK", "Alert", "Recording", "alerts_yaml", "rules_yaml"]

JOB = "isoexec"  # the scrape job that `isoexec dashboards config` writes
RUNBOOK = "dashboards/runbook.md"
DASHBOARD = "/d/isoexec-overview/isoexec-overview"

Severity = Literal["critical", "warning", "none"]

_VIOLATION, _UNKNOWN = 'outcome="violation"', 'outcome="unknown"'
_CONTRACT_MODE, _STEP = 'mode="contract"', 'phase="step"'


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A recording rule: its series name and the expression it stores."""

    record: str
    expr: str


@dataclass(frozen=True, kw_only=True)
class Alert:
    """An alert rule. `wait` is Prometheus' `for`; `summary` is constant, `description` names the instance."""

    name: str
    group: str
    expr: str
    severity: Severity
    summary: str
    description: str
    wait: str = "0s"

    def annotations(self, runbook: str = RUNBOOK) -> dict[str, str]:
        """Return what a notification carries."""
        found = {
            "summary": self.summary,
            "description": self.description,
            "runbook_url": f"{runbook}#{self.name.lower()}",
        }
        if "$labels.run" in self.description:
            found["dashboard_url"] = DASHBOARD + "?var-run={{ $labels.run }}"
        return found


def _rate5(name: str, *matchers: str) -> str:
    return f"rate({series(name, *matchers)}[5m])"


_WEAKENED = 'halting=~"warn|dryrun|off"'
_PAIRED = _rate5("tokens_total")
_UNPAIRED = f"sum by (run, role) ({_rate5('tokens_unpaired_total')})"

RECORDINGS: tuple[Recording, ...] = (
    Recording(
        record="run_pair:isoexec_tokens_bitwise_equal:ratio_rate5m",
        expr=(
            f"sum by (run, pair) ({_rate5('tokens_bitwise_equal_total')})"
            f" / (sum by (run, pair) ({_PAIRED}) > 0)"
        ),
    ),
    Recording(
        record="run_pair:isoexec_logprob_abs_diff_nats:p99_rate5m",
        expr=f"histogram_quantile(0.99, sum by (run, pair, le) ({_rate5('logprob_abs_diff_nats_bucket')}))",
    ),
    Recording(
        record="run:isoexec_tokens_unpaired:ratio_rate5m",
        # one role's lost tokens are the other's too, and each pair of a token counts it again: max, not sum
        expr=(
            f"max by (run) ({_UNPAIRED})"
            f" / (max by (run) ({_UNPAIRED}) + (max by (run) ({_PAIRED}) or max by (run) ({_UNPAIRED}) * 0) > 0)"
        ),
    ),
    Recording(
        record="run:isoexec_probe_seconds:ratio_rate5m",
        expr=(
            f"sum by (run) ({_rate5('probe_seconds_total')})"
            f" / (sum by (run) ({_rate5('step_seconds_total', _STEP)}) > 0)"
        ),
    ),
)


_BY_PROCESS = f"{{}} by (run, pair, role) ({series('logprob_abs_diff_process_nats')})"
_CLIPPED = (
    f"sum by (run, pair) ({_rate5('tokens_clipped_total')})"
    f" / (sum by (run, pair) ({_PAIRED} - {_rate5('tokens_nonfinite_total')}) > 0)"
)


# of the test that heavy tails do not fool; the plain one where it was not made
_CAPPED, _PLAIN = (f"max by (run, pair) (abs({series(name)}))" for name in ("rho_z_capped", "rho_z"))
_SURE_OF_RHO = f"({_CAPPED} >= 0 or {_PLAIN})"


def _claim(claim: str) -> str:
    selector = series("claim", f'claim="{claim}"', _VIOLATION)
    return f"max by (run) ({selector}) == 1"


_MEAN = f"max by (run, pair) ({series('logprob_abs_diff_mean_nats')})"


def _above(degree: int, *, exact: bool, worst: str = _MEAN) -> str:
    """Mean abs d above its regime's bound, as set operations: no label can make them many-to-many."""
    bounds = {regime: rows["mean_abs_d"][degree] for regime, rows in LADDER.items()}
    if exact:
        bounds = {"bitwise": 0.0} | bounds
    clauses = []
    for regime, bound in bounds.items():
        runs = series("run_info", f'regime="{regime}"')
        clauses.append(f"({worst} > {bound} and on (run) {runs})")
    return " or ".join(clauses)


def _grown(*names: str, by: str = "") -> str:
    """Any of the counters grew over 5 minutes; one that is not exported yet hides none of the others."""
    head = f"sum by ({by})" if by else "sum"
    return " or ".join(f"{head} (increase({series(name)}[5m])) > 0" for name in names)


# shards that reach the stream at all
_REACHED = f"{series('shards_heard')} > 0"


def _contract(name: str, claim: str, severity: Severity, summary: str, description: str) -> Alert:
    return Alert(
        name=name,
        group="isoexec-contract",
        expr=_claim(claim),
        severity=severity,
        summary=summary,
        description=description,
    )


def _alert(
    group: str, name: str, severity: Severity, expr: str, summary: str, description: str, wait: str = "0s"
) -> Alert:
    return Alert(
        name=name,
        group=f"isoexec-{group}",
        expr=expr,
        severity=severity,
        summary=summary,
        description=description,
        wait=wait,
    )


ALERTS: tuple[Alert, ...] = (
    _contract(
        "IsoexecTopologyClaimBroken",
        "topology",
        "critical",
        "A parallel degree lies outside the contract's claim.",
        "Run {{ $labels.run }} uses a parallel layout that the contract does not admit.",
    ),
    _contract(
        "IsoexecContractDigestMismatch",
        "handshake",
        "critical",
        "Engine and trainer hold different contracts.",
        "The identities of engine and trainer in run {{ $labels.run }} differ.",
    ),
    _contract(
        "IsoexecKernelReplaced",
        "regions",
        "critical",
        "A region does not run what the contract binds.",
        "In run {{ $labels.run }} an installed kernel was replaced, is missing, or has another source.",
    ),
    _contract(
        "IsoexecCanaryMismatch",
        "canaries",
        "critical",
        "An installed kernel computes other bits than its reference.",
        "In run {{ $labels.run }} a canary gave another digest than the function it stands for.",
    ),
    _contract(
        "IsoexecWeightsStale",
        "weights",
        "critical",
        "Engine and trainer do not hold the same weights.",
        "In run {{ $labels.run }} weights are stale, missing, zero or different in the engine.",
    ),
    _contract(
        "IsoexecSamplingDiffers",
        "sampling",
        "critical",
        "Engine and trainer apply different sampling settings.",
        "In run {{ $labels.run }} the sides disagree on temperature or on what a logprob means.",
    ),
    _contract(
        "IsoexecEnvironmentDiffers",
        "environment",
        "warning",
        "A version or flag that can change bits is not admitted.",
        "In run {{ $labels.run }} a process runs with a version or flag outside the contract.",
    ),
    _alert(
        "contract",
        "IsoexecClaimUnknown",
        "warning",
        f"max by (run, claim) ({series('claim', _UNKNOWN)}) == 1"
        f" and on (run) {series('run_info', _CONTRACT_MODE)}",
        "A claim of the contract is neither kept nor broken: nobody proved it.",
        "Run {{ $labels.run }} has not proved its claim {{ $labels.claim }} for 5 minutes.",
        "5m",
    ),
    _alert(
        "mismatch",
        "IsoexecMismatchAboveRegime",
        "warning",
        _above(0, exact=False),
        "The mismatch is larger than the run's regime explains.",
        "Mean abs d of {{ $labels.pair }} in run {{ $labels.run }} is above the regime's first bound.",
        "1m",
    ),
    _alert(
        "mismatch",
        "IsoexecMismatchSevere",
        "critical",
        _above(1, exact=True),
        "The mismatch is far above the run's regime; in a bitwise run there is any.",
        "Mean abs d of {{ $labels.pair }} in run {{ $labels.run }} is above the regime's second bound.",
    ),
    _alert(
        "mismatch",
        "IsoexecRhoOff",
        "critical",
        f"max by (run, pair) (abs({series('rho_mean')} - 1)) > 0.01 and {_SURE_OF_RHO} > 10",
        "E[rho] is off 1: no numeric noise does that, the sides mean different things.",
        "E[rho] of {{ $labels.pair }} in run {{ $labels.run }} is more than 1 % off 1, by more than 10 standard errors.",
    ),
    _alert(
        "mismatch",
        "IsoexecOneProcessOff",
        "warning",
        f"({_above(0, exact=True, worst=_BY_PROCESS.format('max'))})"
        f" and {_BY_PROCESS.format('max')} > 4 * {_BY_PROCESS.format('min')}",
        "One process of a side carries the mismatch while another is clean.",
        "Of the {{ $labels.role }} processes of run {{ $labels.run }} one has more than 4 times the mismatch of the best.",
        "5m",
    ),
    _alert(
        "mismatch",
        "IsoexecTokensClipped",
        "warning",
        f"{_CLIPPED} > 0.2",
        "Many importance ratios lie outside [0.8, 1.2]: a loss that clips or masks them hides the mismatch.",
        "More than a fifth of the tokens of {{ $labels.pair }} in run {{ $labels.run }} would be clipped.",
        "5m",
    ),
    _alert(
        "mismatch",
        "IsoexecBadLogprobs",
        "warning",
        _grown("tokens_nonfinite_total", "tokens_positive_total", "tokens_id_mismatch_total", by="run"),
        "Logprobs are not finite, are above 0, or belong to other tokens.",
        "Run {{ $labels.run }} reported logprobs that cannot be right in the last 5 minutes.",
    ),
    _alert(
        "mismatch",
        "IsoexecRuleViolated",
        "warning",
        f"max by (run, rule) ({series('rule_outcome', _VIOLATION)}) == 1",
        "A rule of the run has been violated for 5 minutes.",
        "Rule {{ $labels.rule }} of run {{ $labels.run }} is violated.",
        "5m",
    ),
    _alert(
        "mismatch",
        "IsoexecRunHalted",
        "critical",
        f"max by (run) ({series('halted')}) == 1",
        "The daemon halted a run.",
        "Run {{ $labels.run }} is halted and refuses to start until it is cleared.",
    ),
    _alert(
        "watching",
        "IsoexecSilence",
        "critical",
        f"time() - max by (run, role) ({series('last_message_timestamp_seconds')}) > 120"
        f" unless on (run) {series('halted')} == 1",
        "A side of a run has stopped reporting.",
        "The {{ $labels.role }} of run {{ $labels.run }} has sent nothing for more than 2 minutes.",
        "1m",
    ),
    _alert(
        "watching",
        "IsoexecVerdictUnknown",
        "warning",
        f"max by (run) ({series('verdict', _UNKNOWN)}) == 1",
        "Nobody knows whether the run keeps its promises.",
        "The verdict of run {{ $labels.run }} has been unknown for 5 minutes.",
        "5m",
    ),
    _alert(
        "watching",
        "IsoexecVerdictStale",
        "warning",
        f"time() - max by (run) ({series('last_verdict_timestamp_seconds')}) > 900"
        f" and on (run) increase({series('steps_total')}[15m]) > 0",
        "The run moves on and nothing judges it.",
        "Run {{ $labels.run }} has made steps without a verdict for more than 15 minutes.",
    ),
    _alert(
        "watching",
        "IsoexecMessagesDropped",
        "warning",
        _grown("messages_dropped_total", by="run"),
        "Messages are lost between probe and daemon.",
        "Run {{ $labels.run }} lost messages in the last 5 minutes; its windows are not whole.",
    ),
    _alert(
        "watching",
        "IsoexecTokensUnpaired",
        "warning",
        # the expression and not its recording: groups are evaluated side by side
        f"{RECORDINGS[2].expr} > 0.05",
        "Many tokens find no partner on the other side.",
        "More than 5 % of the tokens of run {{ $labels.run }} find no partner in time.",
        "5m",
    ),
    _alert(
        "watching",
        "IsoexecOverheadHigh",
        "warning",
        f"max by (run) ({series('overhead_ratio')}) > 0.02",
        "The probes cost more than 2 % of the step.",
        "Probes of run {{ $labels.run }} have taken more than 2 % of the step for 10 minutes.",
        "10m",
    ),
    _alert(
        "watching",
        "IsoexecDaemonErrors",
        "warning",
        _grown(
            "decode_errors_total", "collector_errors_total", "runs_refused_total", "evidence_errors_total"
        ),
        "The daemon cannot read, collect or export everything.",
        "Unreadable frames, failed collections, refused runs or unwritten evidence in the last 5 minutes.",
    ),
    _alert(
        "watching",
        "IsoexecJournalDegraded",
        "critical",
        f"max({series('journal_degraded')}) == 1 or {_grown('journal_rows_lost_total')}",
        "The journal's disk refuses what is written; verdicts are held in memory only.",
        "The disk of the daemon's state directory is full or failing. A daemon that dies now loses what waits.",
    ),
    _alert(
        "watching",
        "IsoexecHaltingWeakened",
        "warning",
        f"max by (run) ({series('halting', _WEAKENED)}) == 1",
        "A run is not halted whatever its verdicts say.",
        "The mode of run {{ $labels.run }} is warn, dryrun or off.",
        "15m",
    ),
    _alert(
        "watching",
        "IsoexecDaemonDown",
        "critical",
        f'up{{job="{JOB}"}} == 0 or absent(up{{job="{JOB}"}})',
        "The daemon cannot be scraped; nothing watches the runs.",
        "Prometheus has not reached the IsoExec daemon for a minute.",
        "1m",
    ),
    _alert(
        "shards",
        "IsoexecShardSilent",
        "critical",
        # that none is heard is another alert's to say: by its own word a shard hears one
        f"min({_REACHED}) < max({series('shards')})",
        "A shard of the daemon is silent: every verdict is unknown.",
        "Of the daemon's shards {{ $value }} are heard for a minute. Runs that fail closed halt.",
        "1m",
    ),
    _alert(
        "shards",
        "IsoexecVerdictStoreUnreachable",
        "critical",
        f"max by (instance) ({series('shards_heard')}) == 0 and max by (instance) ({series('shards')}) > 0",
        "A shard cannot reach the stream or the verdicts.",
        "The shard at {{ $labels.instance }} has not reached the NATS server, or its bucket, for a minute.",
        "1m",
    ),
    _alert(
        "shards",
        "IsoexecStreamFramesLost",
        "critical",
        _grown("stream_frames_refused_total", "stream_acks_early_total", by="instance"),
        "Frames of the stream are refused, or let go of before they are judged.",
        "The shard at {{ $labels.instance }} refused frames, or could not hold on to them, in the last 5 minutes.",
    ),
    _alert(
        "shards",
        "IsoexecStreamLagging",
        "warning",
        f"min by (instance) (min_over_time({series('stream_frames_waiting')}[10m])) > 256",
        "A shard does not keep up with its stream.",
        "For 10 minutes never fewer than {{ $value }} frames have waited for the shard at {{ $labels.instance }}.",
        "1m",
    ),
    _alert(
        "shards",
        "IsoexecStreamRedelivers",
        "warning",
        f"min by (instance) (increase({series('stream_frames_repeated_total')}[5m])) > 0",
        "The server delivers frames again and again.",
        "Frames that the shard at {{ $labels.instance }} knows have been coming again for 15 minutes.",
        "15m",
    ),
    _alert(
        "watching",
        "IsoexecHeartbeat",
        "none",
        "vector(1)",
        "Always fires, so that its absence tells that alerting is broken.",
        "Route this alert to a dead man's switch.",
    ),
)

_HEADER = "# Generated by `isoexec dashboards build` from dashboards/alerts.py.\n"


def _dump(groups: Sequence[dict[str, Any]]) -> str:
    return _HEADER + yaml.safe_dump({"groups": list(groups)}, sort_keys=False, width=100_000)


def rules_yaml() -> str:
    """Return the recording rules file."""
    rows = [{"record": rule.record, "expr": rule.expr} for rule in RECORDINGS]
    return _dump([{"name": "isoexec-recordings", "rules": rows}])


def alerts_yaml(runbook: str = RUNBOOK) -> str:
    """Return the alert rules file; `runbook` is the address of the runbook page that alerts link to."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for alert in ALERTS:
        groups.setdefault(alert.group, []).append(
            {
                "alert": alert.name,
                "expr": alert.expr,
                "for": alert.wait,
                "labels": {"severity": alert.severity},
                "annotations": alert.annotations(runbook),
            }
        )
    return _dump([{"name": name, "rules": rows} for name, rows in groups.items()])
