# SPDX-License-Identifier: Apache-2.0
"""Every PromQL expression of the dashboard, apart from how it is drawn; metric names come from the catalogue.

`metrics_of` lists the series an expression reads, so that lint and tests can hold it against the catalogue.
"""

from __future__ import annotations

import re

from isoexec.contracts.measures import MEASURES, PREFIX, series_names

__all__ = ["QUERIES", "RUN", "TEST_VALUES", "concrete", "measure_of", "metrics_of", "series"]

RUN = 'run=~"$run"'
ENGINE_PAIR = 'pair="engine_decode:engine_prefill"'
TRAINER_PAIR = 'pair!="engine_decode:engine_prefill"'
PASS, VIOLATION, NOT_PASS = 'outcome="pass"', 'outcome="violation"', 'outcome!="pass"'
OK, WARN, HALT = 'state="ok"', 'state="warn"', 'state="halt"'
STEP, NOT_STEP = 'phase="step"', 'phase!="step"'
REWARD, LOSS, GRAD_NORM = 'value="reward"', 'value="loss"', 'value="grad_norm"'

# what a check puts in place of Grafana's variables
TEST_VALUES = {
    "$__rate_interval": "1m",
    "$__range": "1h",
    "$__interval": "15s",
    "$run": ".+",
    "${datasource}": "prometheus",
}


def series(name: str, *matchers: str) -> str:
    """Return the selector of a catalogued series, `isoexec_<name>{...}`. Raises KeyError for one that
    nobody exports.
    """
    full = PREFIX + name
    if full not in series_names():
        raise KeyError(f"{full} is not in the catalogue of measures")
    return f"{full}{{{', '.join(matchers)}}}" if matchers else full


def concrete(expr: str) -> str:
    """Put test values in place of Grafana's variables."""
    for name, value in sorted(TEST_VALUES.items(), key=lambda item: -len(item[0])):
        expr = expr.replace(name, value)
    return expr


def _run(name: str, *matchers: str) -> str:
    return series(name, RUN, *matchers)


def _rate(name: str, *matchers: str) -> str:
    return f"rate({_run(name, *matchers)}[$__rate_interval])"


def _share(part: str, whole: str, by: str) -> str:
    return f"sum by ({by}) ({_rate(part)}) / (sum by ({by}) ({_rate(whole)}) > 0)"


def _share_of_finite(part: str) -> str:
    """Over the tokens with two finite logprobs, which is what exp(d) exists for."""
    whole = f"sum by (run, pair) ({_rate('tokens_total')} - {_rate('tokens_nonfinite_total')})"
    return f"sum by (run, pair) ({_rate(part)}) / ({whole} > 0)"


QUERIES: dict[str, str] = {
    # verdict
    # state sets drawn as one number: 0 unknown, then the states from good to bad
    "verdict": f"max by (run) ({_run('verdict', PASS)}) + 2 * max by (run) ({_run('verdict', VIOLATION)})",
    "guard_state": (
        f"max by (run) ({_run('guard_state', OK)}) + 2 * max by (run) ({_run('guard_state', WARN)})"
        f" + 3 * max by (run) ({_run('guard_state', HALT)})"
    ),
    "halted": f"max by (run) ({_run('halted')})",
    "step": f"max by (run) ({_run('step')})",
    "bitwise_equal_share": _share("tokens_bitwise_equal_total", "tokens_total", "run, pair"),
    "claims": (
        f"max by (run, claim) ({_run('claim', PASS)}) + 2 * max by (run, claim) ({_run('claim', VIOLATION)})"
    ),
    "rules_not_passing": f"max by (run, rule, outcome) ({_run('rule_outcome', NOT_PASS)}) == 1",
    "decisions": f"sum by (run, rule, action) (increase({_run('decisions_total')}[$__rate_interval])) > 0",
    "halts": f"sum by (run) (increase({_run('halts_total')}[$__rate_interval]))",
    "run_info": f"max by (run, regime, mode, policy) ({_run('run_info')})",
    # mismatch
    "mean_abs_d": f"max by (run, pair) ({_run('logprob_abs_diff_mean_nats')})",
    "percentiles": f"max by (run, pair, percentile) ({_run('logprob_abs_diff_percentile_nats')})",
    "max_abs_d": f"max by (run, pair) ({_run('logprob_abs_diff_max_nats')})",
    "mean_d": f"max by (run, pair) ({_run('logprob_diff_mean_nats')})",
    "kl": f"max by (run, pair, estimator) ({_run('kl_nats', TRAINER_PAIR)})",
    "rho_mean": f"max by (run, pair) ({_run('rho_mean', TRAINER_PAIR)})",
    "rho_z": f"max by (run, pair) (abs({_run('rho_z', TRAINER_PAIR)}))",
    "rho_z_capped": f"max by (run, pair) (abs({_run('rho_z_capped', TRAINER_PAIR)}))",
    "effective_share": _share_of_finite("tokens_effective_total"),
    "clipped_share": _share_of_finite("tokens_clipped_total"),
    "by_process": f"max by (run, pair, role, process) ({_run('logprob_abs_diff_process_nats', TRAINER_PAIR)})",
    "by_position": f"max by (run, pair, position) ({_run('logprob_abs_diff_position_nats', TRAINER_PAIR)})",
    "by_from_end": f"max by (run, pair, from_end) ({_run('logprob_abs_diff_from_end_nats', TRAINER_PAIR)})",
    "by_group": f"max by (run, pair, group) ({_run('logprob_abs_diff_group_nats', TRAINER_PAIR)})",
    "histogram": f"sum by (le) (increase({_run('logprob_abs_diff_nats_bucket', TRAINER_PAIR)}[$__rate_interval]))",
    "witness": f"max by (run) ({_run('logprob_abs_diff_mean_nats', ENGINE_PAIR)})",
    "nonfinite": f"sum by (run) ({_rate('tokens_nonfinite_total')})",
    "exact_zero": f"sum by (run) ({_rate('tokens_exact_zero_total')})",
    "positive": f"sum by (run) ({_rate('tokens_positive_total')})",
    "id_mismatch": f"sum by (run) ({_rate('tokens_id_mismatch_total')})",
    # contract
    "region_breaks": f"sum by (run, role, region) ({_run('region_breaks')})",
    "weight_version": f"max by (run, role) ({_run('weight_version')})",
    # time and training
    "step_by_phase": f"max by (run, phase) ({_run('step_last_seconds', NOT_STEP)})",
    "step_seconds": f"max by (run) ({_run('step_last_seconds', STEP)})",
    "overhead": f"max by (run) ({_run('overhead_ratio')})",
    "probe_share": (
        f"sum by (run) ({_rate('probe_seconds_total')}) / "
        f"(sum by (run) ({_rate('step_seconds_total', STEP)}) > 0)"
    ),
    "steps_per_second": f"sum by (run) ({_rate('steps_total')})",
    "reward": f"max by (run) ({_run('train_value', REWARD)})",
    "loss": f"max by (run) ({_run('train_value', LOSS)})",
    "grad_norm": f"max by (run) ({_run('train_value', GRAD_NORM)})",
    # the watching itself
    "last_message_age": f"time() - max by (run, role) ({_run('last_message_timestamp_seconds')})",
    "last_verdict_age": f"time() - max by (run) ({_run('last_verdict_timestamp_seconds')})",
    "dropped": f"sum by (run, role) (increase({_run('messages_dropped_total')}[$__rate_interval]))",
    "received": f"sum by (run, role) ({_rate('messages_received_total')})",
    "sent": f"sum by (run, role) ({_rate('messages_sent_total')})",
    "received_bytes": f"sum by (run) ({_rate('received_bytes_total')})",
    "tokens": f"sum by (run, pair) ({_rate('tokens_total')})",
    "unpaired": f"sum by (run, role) ({_rate('tokens_unpaired_total')})",
    "unpaired_why": f"sum by (run, role, reason) (increase({_run('tokens_unpaired_total')}[$__rate_interval]))",
    "pending": f"max by (run, role) ({_run('tokens_pending')})",
    "decode_errors": f"sum(increase({series('decode_errors_total')}[$__rate_interval]))",
    "journal_errors": f"sum(increase({series('journal_errors_total')}[$__rate_interval]))",
    "journal_waiting": f"max({series('journal_rows_waiting')})",
    "halt_stages": f"sum by (run, stage) (increase({_run('halt_stages_total')}[$__rate_interval]))",
    "halt_stage_time": f"sum by (run, stage) (increase({_run('halt_stage_seconds_total')}[$__rate_interval]))",
    "collector_errors": f"sum(increase({series('collector_errors_total')}[$__rate_interval]))",
    "shards_heard": f"min({series('shards_heard')})",
    "shards": f"max({series('shards')})",
    "stream_waiting": f"sum({series('stream_frames_waiting')})",
    "stream_held": f"sum({series('stream_frames_held')})",
    "stream_repeated": f"sum(increase({series('stream_frames_repeated_total')}[$__rate_interval]))",
    "stream_refused": f"sum(increase({series('stream_frames_refused_total')}[$__rate_interval]))",
    "stream_acks_early": f"sum(increase({series('stream_acks_early_total')}[$__rate_interval]))",
    "queue_depth": f"max({series('queue_depth')})",
    "connections": f"max({series('connections')})",
    "daemon_cpu_ingest": f"sum(rate({series('ingest_seconds_total')}[$__rate_interval]))",
    "daemon_cpu_evaluate": f"sum(rate({series('evaluate_seconds_total')}[$__rate_interval]))",
    "build": f"max by (version, python_version) ({series('build_info')})",
}

_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
_BRACES = re.compile(r"\{[^{}]*\}|\[[^\]]*\]")
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_WORDS = frozenset({"and", "or", "unless", "bool", "offset", "inf", "nan", "group_left", "group_right"})


def metrics_of(expr: str) -> frozenset[str]:
    """Every series name that a PromQL expression reads."""
    bare = _BRACES.sub(" ", _GROUPING.sub(" ", _STRINGS.sub('""', concrete(expr))))
    names: set[str] = set()
    for match in _NAME.finditer(bare):
        before = bare[match.start() - 1] if match.start() else " "
        called = bare[match.end() :].lstrip().startswith("(")
        if not called and not before.isdigit() and before != "." and match.group().lower() not in _WORDS:
            names.add(match.group())
    aggregations = {"sum", "max", "min", "avg", "count"}
    return frozenset(names - aggregations)


def measure_of(series_name: str) -> str:
    """The catalogue name behind a series name; "" when there is none."""
    for suffix in ("", "_bucket", "_sum", "_count"):
        name = series_name.removesuffix(suffix) if suffix else series_name
        if name in MEASURES and (not suffix or MEASURES[name].kind == "histogram"):
            return name
    return ""
