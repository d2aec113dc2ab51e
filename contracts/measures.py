# SPDX-License-Identifier: Apache-2.0
"""The catalogue of every exported metric: the daemon exports these, dashboards and alerts name only these.

Names are what Prometheus shows: counters end in `_total`, a histogram also has `_bucket`, `_sum` and
`_count`. A `stateset` is exposed as a gauge whose last label takes each of `states`, exactly one of them 1
and the others 0; all states exist from the first scrape on, `unknown` being the first one set. Labels are
`run` and small fixed sets: never a step, a token, a rank or a path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isoexec.contracts.window import HISTOGRAM_EDGES, PAIRS, ROLES, UNPAIRED_REASONS

__all__ = [
    "ACTIONS",
    "CLAIMS",
    "LABEL_VALUES",
    "MEASURES",
    "MODES",
    "OUTCOMES",
    "PAIR_LABELS",
    "PHASES",
    "PREFIX",
    "PROCESSES",
    "STAGES",
    "STATES",
    "Measure",
    "series_names",
]

PREFIX = "isoexec_"

OUTCOMES = ("pass", "violation", "unknown")
ACTIONS = ("dryrun", "warn", "halt")
STATES = ("ok", "warn", "halt", "unknown")
MODES = ("enforce", "warn", "dryrun", "off", "unknown")
STAGES = ("cooperative", "terminate", "runtime", "kill")
CLAIMS = ("handshake", "topology", "regions", "canaries", "weights", "sampling", "environment")
PHASES = ("generation", "score", "train", "sync", "step", "probe")
PAIR_LABELS = tuple(":".join(pair) for pair in PAIRS)
TRAIN_VALUES = ("loss", "reward", "grad_norm")
PROCESSES = 64
"""Processes of a role with series of their own; the others share one."""

# labels whose values come from a fixed set; `run`, `rule` and `region` come from the run's declarations
LABEL_VALUES: dict[str, tuple[str, ...]] = {
    "pair": PAIR_LABELS,
    "role": ROLES,
    "estimator": ("k1", "k2", "k3"),
    "percentile": ("50", "90", "99", "99.9"),
    # of a sequence: where its tokens lie, and how it was computed
    "position": ("0", "1-15", "16-127", "128-1023", "1024-4095", "4096-16383", "16384+"),
    "from_end": ("0", "1-15", "16-127", "128+"),
    "group": (
        *("prefix_miss", "prefix_hit", "pack_0", "pack_1", "pack_2_3", "pack_4_7", "pack_8"),
        *("unpadded", "padded"),
    ),
    # a place that its process is given, never a name that it gives itself
    "process": (*map(str, range(PROCESSES)), "other"),
    "outcome": OUTCOMES,
    "action": ACTIONS,
    "state": STATES,
    "claim": CLAIMS,
    "phase": PHASES,
    "value": TRAIN_VALUES,
    "type": ("hello", "attestation", "logprobs", "weights", "step", "probe", "bye"),
    "mode": ("monitor", "contract"),
    "halting": MODES,
    "stage": STAGES,
    "policy": ("fail_open", "fail_closed"),
    "reason": tuple(UNPAIRED_REASONS),
}

Kind = Literal["counter", "gauge", "histogram", "stateset", "info"]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One metric: exposed name, kind, help, label names, unit, and buckets or states where it has them."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""  # "" is a plain count or number
    buckets: tuple[float, ...] = ()
    states: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        """The family name a metrics library wants: the name without `_total` or `_info`."""
        suffix = {"counter": "_total", "info": "_info"}.get(self.kind, "")
        return self.name.removesuffix(suffix)


def _counter(name: str, text: str, *labels: str, unit: str = "") -> Measure:
    return Measure(name=PREFIX + name + "_total", kind="counter", help=text, labels=labels, unit=unit)


def _gauge(name: str, text: str, *labels: str, unit: str = "") -> Measure:
    return Measure(name=PREFIX + name, kind="gauge", help=text, labels=labels, unit=unit)


def _states(name: str, text: str, *labels: str, states: tuple[str, ...]) -> Measure:
    return Measure(name=PREFIX + name, kind="stateset", help=text, labels=labels, states=states)


_ALL = (
    # tokens: counted before anything is averaged
    _counter("tokens", "Paired tokens, non-finite ones included", "run", "pair"),
    _counter("tokens_bitwise_equal", "Paired tokens whose two logprobs have the same 32 bits", "run", "pair"),
    _counter("tokens_nonfinite", "Paired tokens with NaN or infinity on either side", "run", "pair"),
    _counter(
        "tokens_exact_zero",
        "Paired tokens with exactly 0.0 on one side and a clearly lower value on the other",
        "run",
        "pair",
    ),
    _counter("tokens_positive", "Paired tokens with a logprob above 0 on either side", "run", "pair"),
    _counter("tokens_id_mismatch", "Tokens paired by position whose ids differ", "run", "pair"),
    _counter("tokens_unpaired", "Tokens that found no partner in time, by why", "run", "role", "reason"),
    _gauge("tokens_pending", "Tokens waiting for their partner", "run", "role"),
    # the mismatch d = trainer logprob - rollout logprob
    Measure(
        name=PREFIX + "logprob_abs_diff_nats",
        kind="histogram",
        help="abs d over finite paired tokens; quantiles saturate at 10 nats, see logprob_abs_diff_max_nats",
        labels=("run", "pair"),
        unit="nats",
        buckets=HISTOGRAM_EDGES,
    ),
    _gauge("logprob_abs_diff_mean_nats", "Mean abs d of the last window", "run", "pair", unit="nats"),
    _gauge(
        "logprob_abs_diff_percentile_nats",
        "Percentile of abs d of the last window",
        "run",
        "pair",
        "percentile",
        unit="nats",
    ),
    _gauge("logprob_abs_diff_max_nats", "Largest abs d of the last window", "run", "pair", unit="nats"),
    _gauge("logprob_diff_mean_nats", "Mean d of the last window", "run", "pair", unit="nats"),
    _gauge("kl_nats", "KL(rollout, trainer) of the last window", "run", "pair", "estimator", unit="nats"),
    _gauge("rho_mean", "Mean of exp(d) of the last window; 1 for any numeric noise", "run", "pair"),
    _gauge("rho_z", "Standard errors by which the mean of exp(d) is off 1", "run", "pair"),
    _gauge(
        "rho_z_capped",
        "Standard errors by which the mean of exp(d) is off 1, whatever the tails",
        "run",
        "pair",
    ),
    _counter("tokens_effective", "Effective sample size of each window, in tokens, added up", "run", "pair"),
    _counter("tokens_clipped", "Paired tokens with exp(d) outside [0.8, 1.2]", "run", "pair"),
    # where it lies: of the last window, absent where nothing was seen
    _gauge(
        "logprob_abs_diff_position_nats",
        "Mean abs d by position in the response, of the last window",
        "run",
        "pair",
        "position",
        unit="nats",
    ),
    _gauge(
        "logprob_abs_diff_from_end_nats",
        "Mean abs d by distance to the last token, of the last window",
        "run",
        "pair",
        "from_end",
        unit="nats",
    ),
    _gauge(
        "logprob_abs_diff_group_nats",
        "Mean abs d by prefix-cache hit, place in the pack and padding, of the last window",
        "run",
        "pair",
        "group",
        unit="nats",
    ),
    _gauge(
        "logprob_abs_diff_process_nats",
        "Mean abs d by the process of either side, of the last window; the page of a run says which is which",
        "run",
        "pair",
        "role",
        "process",
        unit="nats",
    ),
    # verdicts
    _states(
        "verdict",
        "Verdict of the last window: the worst outcome of its rules",
        "run",
        "outcome",
        states=OUTCOMES,
    ),
    _states(
        "rule_outcome", "Outcome of each rule in the last window", "run", "rule", "outcome", states=OUTCOMES
    ),
    _states("claim", "Whether each contract claim holds", "run", "claim", "outcome", states=OUTCOMES),
    _states("guard_state", "What the lease tells the trainer's guard", "run", "state", states=STATES),
    _counter(
        "decisions", "Verdicts that asked for an action, by rule; dryrun did nothing", "run", "rule", "action"
    ),
    _gauge(
        "region_breaks",
        "Processes in which a region does not run what the contract binds",
        "run",
        "role",
        "region",
    ),
    _counter("halts", "Times the run was halted", "run"),
    _gauge("halted", "1 while a halt marker stands, else 0", "run"),
    _states("halting", "What verdicts may do to the run: its mode", "run", "halting", states=MODES),
    _counter("halt_stages", "Stages of stopping that halts came to", "run", "stage"),
    _counter("halt_stage_seconds", "Time that halts spent in each stage", "run", "stage", unit="seconds"),
    # progress and cost
    _gauge("step", "Last step seen", "run"),
    _counter("steps", "Steps seen", "run"),
    _gauge("weight_version", "Weight version last used by the role", "run", "role"),
    _gauge("step_last_seconds", "Time of the last step by phase", "run", "phase", unit="seconds"),
    _counter("step_seconds", "Time spent by phase", "run", "phase", unit="seconds"),
    _counter("probe_seconds", "Time the probes took from the job", "run", "role", unit="seconds"),
    _gauge("overhead_ratio", "Probe time / step time of the last step", "run", unit="ratio"),
    _gauge("train_value", "Training values reported with the last step", "run", "value"),
    # the way from probe to daemon
    _gauge(
        "last_message_timestamp_seconds",
        "Unix time of the role's last message",
        "run",
        "role",
        unit="seconds",
    ),
    _gauge("last_verdict_timestamp_seconds", "Unix time of the last verdict", "run", unit="seconds"),
    _counter("messages_received", "Messages received", "run", "role", "type"),
    _counter("messages_sent", "Messages the probes say they sent", "run", "role"),
    _counter("messages_dropped", "Messages the probes dropped or that never arrived", "run", "role"),
    _counter("received_bytes", "Bytes received", "run", "role", unit="bytes"),
    # shards behind a stream
    _gauge("shards_heard", "Shards of the daemon whose word is fresh; 0 without a stream or its server"),
    _gauge("shards", "Shards that the daemon is one of; 0 without a stream"),
    _gauge("stream_frames_waiting", "Frames of this shard that the server has not delivered yet"),
    _gauge("stream_frames_held", "Frames of the stream that are not accounted for yet"),
    _counter("stream_frames_repeated", "Frames that came again and were known"),
    _counter("stream_frames_refused", "Frames of processes that this shard knows no hello of"),
    _counter("stream_acks_early", "Frames let go of before they were judged, because too many were open"),
    # the daemon itself
    _counter("decode_errors", "Frames that could not be read; each closed its connection"),
    _counter("collector_errors", "Scrapes in which a part of the collector failed"),
    _counter("runs_refused", "Runs not exported because the cap on runs was reached"),
    _gauge("journal_degraded", "1 while rows wait in memory for a disk that refuses them, else 0"),
    _gauge("journal_rows_waiting", "Rows that wait for the journal's disk"),
    _counter("journal_errors", "Writes that the journal's disk refused"),
    _counter("journal_rows_lost", "Journal rows given up because too many waited"),
    _counter("evidence_errors", "Samples and evidence bundles that could not be written"),
    _counter("ingest_seconds", "Processor time spent reading and pairing", unit="seconds"),
    _counter("evaluate_seconds", "Processor time spent judging windows", unit="seconds"),
    _gauge("queue_depth", "Messages received and not yet processed"),
    _gauge("connections", "Open probe connections"),
    Measure(
        name=PREFIX + "build_info",
        kind="info",
        help="Version of the daemon; always 1",
        labels=("version", "python_version"),
    ),
    Measure(
        name=PREFIX + "run_info",
        kind="info",
        help="Regime, mode and daemon-loss policy of a run; always 1",
        labels=("run", "regime", "mode", "policy"),
    ),
)

MEASURES: dict[str, Measure] = {measure.name: measure for measure in _ALL}


def series_names() -> frozenset[str]:
    """Every series name a scrape can show: histograms contribute `_bucket`, `_sum` and `_count`."""
    names: set[str] = set()
    for measure in _ALL:
        if measure.kind == "histogram":
            names.update(measure.name + suffix for suffix in ("_bucket", "_sum", "_count"))
        else:
            names.add(measure.name)
    return frozenset(names)
