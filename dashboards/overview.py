# SPDX-License-Identifier: Apache-2.0
"""The overview dashboard: is the contract kept, how large is the mismatch, what does it cost, who is
silent.
"""

from __future__ import annotations

from typing import Any

from isoexec.dashboards.panels import Kind, Panel, Row, Target, Threshold, dashboard, value_mapping
from isoexec.dashboards.queries import QUERIES, RUN, series

__all__ = ["ROWS", "UID", "overview"]

UID = "isoexec-overview"

NATS = "suffix: nats"
_GREEN, _ORANGE, _RED = "green", "orange", "red"

_ALARM = (Threshold(color=_GREEN), Threshold(color=_RED, value=1))
# 0: none of the known states is set
_OUTCOMES = value_mapping({"0": ("unknown", _ORANGE), "1": ("pass", _GREEN), "2": ("violation", _RED)})
_GUARD = value_mapping(
    {"0": ("unknown", _ORANGE), "1": ("ok", _GREEN), "2": ("warn", _ORANGE), "3": ("halt", _RED)}
)
_CLAIMS = value_mapping({"0": ("unknown", _ORANGE), "1": ("kept", _GREEN), "2": ("broken", _RED)})


def _ask(query: str, legend: str = "", *, instant: bool = False, table: bool = False) -> Target:
    return Target(
        expr=QUERIES[query],
        legend=legend,
        instant=instant or table,
        format="table" if table else "time_series",
    )


def _panel(kind: Kind, title: str, description: str, *targets: Target, **how: Any) -> Panel:
    return Panel(kind=kind, title=title, description=description, targets=targets, **how)


_VERDICT = Row(
    title="Verdict",
    panels=(
        _panel(
            "stat",
            "Verdict",
            "The worst outcome of the rules in the last window. `unknown` is not clean: something was not seen.",
            _ask("verdict", "{{run}}", instant=True),
            mappings=(_OUTCOMES,),
            width=4,
            height=4,
        ),
        _panel(
            "stat",
            "Guard",
            "What the lease tells the trainer's guard at its next step.",
            _ask("guard_state", "{{run}}", instant=True),
            mappings=(_GUARD,),
            width=4,
            height=4,
        ),
        _panel(
            "stat",
            "Halted",
            "A halt marker stands until `isoexec clear RUN`; the run refuses to start before.",
            _ask("halted", "{{run}}", instant=True),
            thresholds=_ALARM,
            mappings=(value_mapping({"0": ("running", _GREEN), "1": ("halted", _RED)}),),
            width=4,
            height=4,
        ),
        _panel(
            "stat",
            "Bitwise equal",
            "Share of paired tokens whose two logprobs have the same 32 bits; 100 % in the bitwise regime.",
            _ask("bitwise_equal_share", "{{pair}}"),
            unit="percentunit",
            decimals=2,
            thresholds=(Threshold(color="blue"),),
            width=8,
            height=4,
        ),
        _panel(
            "stat",
            "Step",
            "The last step seen.",
            _ask("step", "{{run}}", instant=True),
            thresholds=(Threshold(color="blue"),),
            decimals=0,
            width=4,
            height=4,
        ),
        _panel(
            "table",
            "Rules that do not pass",
            "Every rule with the outcome violation or unknown in the last window. Empty is good.",
            _ask("rules_not_passing", table=True),
            width=12,
            height=7,
        ),
        _panel(
            "table",
            "Runs",
            "Regime, mode and daemon-loss policy that each run declared.",
            _ask("run_info", table=True),
            width=6,
            height=7,
        ),
        _panel(
            "timeseries",
            "Decisions",
            "Verdicts that asked for an action, by rule. `dryrun` shows what would have happened.",
            _ask("decisions", "{{rule}} {{action}}"),
            _ask("halts", "halted {{run}}"),
            unit="short",
            width=6,
            height=7,
            minimum=0,
        ),
    ),
)

_CONTRACT = Row(
    title="Contract",
    panels=(
        _panel(
            "state-timeline",
            "Claims",
            "Whether each claim of the contract holds. Unknown means that no process proved it lately.",
            _ask("claims", "{{run}} {{claim}}"),
            mappings=(_CLAIMS,),
            thresholds=(
                Threshold(color=_ORANGE),
                Threshold(color=_GREEN, value=1),
                Threshold(color=_RED, value=2),
            ),
            width=12,
        ),
        _panel(
            "timeseries",
            "Regions not as bound",
            "Processes in which a region runs something else than the contract binds; must be 0.",
            _ask("region_breaks", "{{role}} {{region}}"),
            unit="short",
            width=6,
            minimum=0,
        ),
        _panel(
            "timeseries",
            "Weight version",
            "Version last used by each role. A gap that stays is a sync that did not happen.",
            _ask("weight_version", "{{run}} {{role}}"),
            unit="short",
            width=6,
            decimals=0,
        ),
    ),
)

_MISMATCH = Row(
    title="Mismatch: d = trainer logprob - rollout logprob",
    panels=(
        _panel(
            "timeseries",
            "Mean abs d",
            "Mean absolute d of the last window, per case pair. Compare with the run's regime, not across regimes.",
            _ask("mean_abs_d", "{{run}} {{pair}}"),
            unit=NATS,
            log_scale=True,
        ),
        _panel(
            "timeseries",
            "Percentiles and largest abs d",
            "Of the last window. Averages hide few bad sequences; these do not.",
            _ask("percentiles", "p{{percentile}} {{pair}}"),
            _ask("max_abs_d", "max {{pair}}"),
            unit=NATS,
            log_scale=True,
        ),
        _panel(
            "heatmap",
            "Distribution of abs d",
            "Tokens per half decade of abs d. A second band is a second population: a sparse fault.",
            Target(expr=QUERIES["histogram"], legend="{{le}}", format="heatmap"),
            unit="short",
        ),
        _panel(
            "timeseries",
            "KL(rollout, trainer)",
            "k1, k2 and k3 estimates of the last window. k2 and k3 are never below 0.",
            _ask("kl", "{{estimator}} {{pair}}"),
            unit=NATS,
        ),
        _panel(
            "timeseries",
            "E[rho]",
            "Mean of exp(d). 1 for any amount of numeric noise or staleness; off 1 the fault is semantic: "
            "temperature, top-p, shift, filled values.",
            _ask("rho_mean", "{{run}} {{pair}}"),
            unit="short",
            decimals=4,
        ),
        _panel(
            "timeseries",
            "E[rho] test",
            "Standard errors by which E[rho] is off 1. Above 5 look at it, above 10 with an effect act on it. "
            "Heavy tails can fool the plain test, not the capped one.",
            _ask("rho_z", "{{run}} {{pair}}"),
            _ask("rho_z_capped", "capped {{run}} {{pair}}"),
            unit="short",
            minimum=0,
        ),
        _panel(
            "timeseries",
            "Mean d",
            "Signed mean of d. One-signed together with E[rho] off 1: the sides normalise over other tokens.",
            _ask("mean_d", "{{run}} {{pair}}"),
            unit=NATS,
        ),
        _panel(
            "timeseries",
            "Third witness: engine decode against its own prefill",
            "Mean abs d between the engine's decode and its prefill rescore. Off: the engine is at fault.",
            _ask("witness", "{{run}}"),
            unit=NATS,
            log_scale=True,
        ),
        _panel(
            "timeseries",
            "Tokens that should not be",
            "Non-finite, exactly 0.0 on one side, above 0, or paired with another id; per second.",
            _ask("nonfinite", "non-finite {{run}}"),
            _ask("exact_zero", "exactly 0.0 {{run}}"),
            _ask("positive", "above 0 {{run}}"),
            _ask("id_mismatch", "other id {{run}}"),
            unit="ops",
            minimum=0,
        ),
        _panel(
            "timeseries",
            "Effective sample and clipped share",
            "Effective sample size over tokens, 1 for equal policies, and share of rho outside [0.8, 1.2]. Clipping "
            "hides a fault from the loss, not from here.",
            _ask("effective_share", "effective {{run}} {{pair}}"),
            _ask("clipped_share", "clipped {{run}} {{pair}}"),
            unit="percentunit",
            minimum=0,
            maximum=1,
        ),
    ),
)

_PLACES = Row(
    title="Where the mismatch lies",
    panels=(
        _panel(
            "timeseries",
            "By process",
            "Mean abs d by the process that sampled or scored; `isoexec status` and the page of a run name it. One alone "
            "off: a missed sync, a recovered engine, or its hardware.",
            _ask("by_process", "{{role}} {{process}} {{pair}}"),
            unit=NATS,
            log_scale=True,
            width=12,
        ),
        _panel(
            "timeseries",
            "By prefix hit, pack and padding",
            "Mean abs d of sequences by how they were computed, where senders say so. Only hits off: stale KV. Only later "
            "places of a pack off: its boundaries.",
            _ask("by_group", "{{group}} {{pair}}"),
            unit=NATS,
            log_scale=True,
            width=12,
        ),
        _panel(
            "timeseries",
            "By position",
            "Mean abs d by position in the response. Smooth growth: attention state. A step: a window, a chunk, a turn.",
            _ask("by_position", "{{position}} {{pair}}"),
            unit=NATS,
            log_scale=True,
            width=12,
        ),
        _panel(
            "timeseries",
            "By distance to the end",
            "Mean abs d by distance to the last token. Only the last one off: label roll or EOS.",
            _ask("by_from_end", "{{from_end}} {{pair}}"),
            unit=NATS,
            log_scale=True,
            width=12,
        ),
    ),
)

_TIME = Row(
    title="Time and training",
    panels=(
        _panel(
            "timeseries",
            "Step by phase",
            "Seconds of the last step: generation, scoring, training, weight sync, probes.",
            _ask("step_by_phase", "{{run}} {{phase}}"),
            unit="s",
            stacked=True,
            minimum=0,
        ),
        _panel(
            "timeseries",
            "Full step",
            "Seconds of the last full step.",
            _ask("step_seconds", "{{run}}"),
            unit="s",
            minimum=0,
        ),
        _panel(
            "timeseries",
            "Cost of the probes",
            "Probe time as a share of step time: the last step, and over time.",
            _ask("overhead", "last step {{run}}"),
            _ask("probe_share", "mean {{run}}"),
            unit="percentunit",
            minimum=0,
        ),
        _panel(
            "timeseries",
            "Reward",
            "As the trainer reported it.",
            _ask("reward", "{{run}}"),
            unit="short",
        ),
        _panel(
            "timeseries",
            "Loss and gradient norm",
            "As the trainer reported them.",
            _ask("loss", "loss {{run}}"),
            _ask("grad_norm", "gradient norm {{run}}"),
            unit="short",
        ),
        _panel(
            "timeseries",
            "Steps per second",
            "How fast the run moves.",
            _ask("steps_per_second", "{{run}}"),
            unit="ops",
            minimum=0,
        ),
    ),
)

_WATCH = Row(
    title="The watching itself",
    panels=(
        _panel(
            "timeseries",
            "Silence",
            "Seconds since the last message of each role and since the last verdict.",
            _ask("last_message_age", "{{run}} {{role}}"),
            _ask("last_verdict_age", "{{run}} verdict"),
            unit="s",
            minimum=0,
        ),
        _panel(
            "timeseries",
            "Dropped messages",
            "Messages that never arrived. A window with drops has not seen everything.",
            _ask("dropped", "{{run}} {{role}}"),
            unit="short",
            minimum=0,
        ),
        _panel(
            "timeseries",
            "Messages",
            "Messages per second that arrived, and that the probes say they sent.",
            _ask("received", "received {{role}}"),
            _ask("sent", "sent {{role}}"),
            unit="ops",
            minimum=0,
        ),
        _panel(
            "timeseries",
            "Tokens paired and lost",
            "Tokens per second that found their partner, and that did not in time.",
            _ask("tokens", "paired {{pair}}"),
            _ask("unpaired", "no partner {{role}}"),
            unit="ops",
            minimum=0,
        ),
        _panel(
            "timeseries",
            "Why tokens found no partner",
            "Tokens that found no partner, by the side that reported them and by why; each token counts once.",
            _ask("unpaired_why", "{{role}} {{reason}}"),
            unit="short",
            minimum=0,
        ),
        _panel(
            "timeseries",
            "Waiting for a partner",
            "Tokens held until the other side reports the same sequence.",
            _ask("pending", "{{run}} {{role}}"),
            unit="short",
            minimum=0,
        ),
        _panel(
            "timeseries",
            "Errors",
            "Frames that could not be read and scrapes in which a part of the collector failed.",
            _ask("decode_errors", "unreadable frames"),
            _ask("collector_errors", "failed collections"),
            unit="short",
            minimum=0,
        ),
        _panel(
            "timeseries",
            "Journal",
            "Writes that the disk refused, and rows that wait in memory for it; both are 0 on a disk with room.",
            _ask("journal_errors", "refused writes"),
            _ask("journal_waiting", "rows waiting"),
            unit="short",
            minimum=0,
        ),
        _panel(
            "timeseries",
            "Stages of halts",
            "How far halts had to go: cooperative, SIGTERM, the runtime, SIGKILL.",
            _ask("halt_stages", "{{run}} {{stage}}"),
            unit="short",
            minimum=0,
        ),
        _panel(
            "timeseries",
            "Time to stop",
            "Seconds that halts spent in each stage until every process of this host was gone.",
            _ask("halt_stage_time", "{{run}} {{stage}}"),
            unit="s",
            minimum=0,
        ),
        _panel(
            "timeseries",
            "Load",
            "Processor seconds per second spent on reading and judging.",
            _ask("daemon_cpu_ingest", "reading and pairing"),
            _ask("daemon_cpu_evaluate", "judging"),
            unit="percentunit",
            minimum=0,
        ),
        _panel(
            "timeseries",
            "Queue and connections",
            "Messages received and not yet processed, and open probe connections.",
            _ask("queue_depth", "queue"),
            _ask("connections", "connections"),
            unit="short",
            minimum=0,
        ),
        _panel(
            "timeseries",
            "Shards",
            "Shards whose word is fresh, as the one sees it that hears the fewest, and how many there are; 0 without a stream.",
            _ask("shards_heard", "heard"),
            _ask("shards", "there are"),
            unit="short",
            minimum=0,
        ),
        _panel(
            "timeseries",
            "Frames of the stream",
            "With the server; held until journaled; known ones that came again; of unknown processes; let go of too early.",
            _ask("stream_waiting", "with the server"),
            _ask("stream_held", "held"),
            _ask("stream_repeated", "came again"),
            _ask("stream_refused", "refused"),
            _ask("stream_acks_early", "let go of early"),
            unit="short",
            minimum=0,
        ),
        _panel(
            "timeseries",
            "Traffic",
            "Bytes per second from the probes.",
            _ask("received_bytes", "{{run}}"),
            unit="Bps",
            minimum=0,
        ),
        _panel(
            "table",
            "Daemon",
            "Version of the daemon and of its Python.",
            _ask("build", table=True),
            width=8,
            height=4,
        ),
    ),
)

ROWS = (_VERDICT, _CONTRACT, _MISMATCH, _PLACES, _TIME, _WATCH)


def overview() -> dict[str, Any]:
    """Return the dashboard as plain data."""
    return dashboard(
        uid=UID,
        title="IsoExec / Overview",
        description="Training-inference mismatch, the execution contract, and what watching them costs.",
        rows=ROWS,
        run_query=f"label_values({series('run_info')}, run)",
        annotation_expr=f"changes({series('halted', RUN)}[$__interval]) > 0",
        annotation_title="Halted or cleared",
    )
