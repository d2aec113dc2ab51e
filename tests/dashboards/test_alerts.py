# SPDX-License-Identifier: Apache-2.0
"""Alerts: known metrics, a runbook section and promtool cases for each, and a promtool that can fail."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from isoexec.contracts.causes import CAUSES
from isoexec.contracts.rules import LADDER
from isoexec.dashboards.alerts import ALERTS, RECORDINGS, alerts_yaml
from isoexec.dashboards.build import GENERATED
from isoexec.dashboards.queries import measure_of, metrics_of

HERE = Path(__file__).parent
CASES = sorted(HERE.glob("*-test.yaml"))
RUNBOOK = GENERATED.parent / "runbook.md"

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on the PATH")


def promtool(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *map(str, args)], capture_output=True, text=True, timeout=120)


def headings(level: int) -> list[str]:
    marks = "#" * level
    return re.findall(rf"^{marks} (.+)$", RUNBOOK.read_text(encoding="utf-8"), flags=re.MULTILINE)


def section(name: str) -> str:
    text = RUNBOOK.read_text(encoding="utf-8")
    return text.split(f"\n### {name}\n", 1)[1].split("\n### ", 1)[0].split("\n## ", 1)[0]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda a: a.name)
def test_an_alert_reads_only_what_is_exported(alert: Any) -> None:
    recorded = {rule.record for rule in RECORDINGS}
    unknown = {n for n in metrics_of(alert.expr) if not measure_of(n) and n not in recorded and n != "up"}
    assert unknown == set()


@pytest.mark.parametrize("rule", RECORDINGS, ids=lambda r: r.record)
def test_a_recording_rule_reads_only_what_is_exported(rule: Any) -> None:
    assert {n for n in metrics_of(rule.expr) if not measure_of(n)} == set()
    assert re.fullmatch(r"[a-z_]+:isoexec_[a-z_]+:[a-z0-9_]+", rule.record)


def test_alert_names_are_prefixed_and_used_once() -> None:
    names = [alert.name for alert in ALERTS]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"Isoexec[A-Z][A-Za-z]+", name) for name in names)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda a: a.name)
def test_annotations_say_what_where_and_what_to_do(alert: Any) -> None:
    found = alert.annotations("https://example.org/runbook")
    assert found["summary"].endswith(".")
    assert "{{" not in found["summary"]
    assert found["description"]
    assert found["runbook_url"] == f"https://example.org/runbook#{alert.name.lower()}"


@pytest.mark.parametrize(
    "name",
    [
        "IsoexecTopologyClaimBroken",
        "IsoexecContractDigestMismatch",
        "IsoexecKernelReplaced",
        "IsoexecCanaryMismatch",
    ],
)
def test_what_breaks_the_contract_alerts_at_the_next_evaluation(name: str) -> None:
    (alert,) = [a for a in ALERTS if a.name == name]
    assert (alert.wait, alert.severity) == ("0s", "critical")


def test_mismatch_alerts_take_their_bounds_from_the_default_ladder() -> None:
    (warn,) = [a for a in ALERTS if a.name == "IsoexecMismatchAboveRegime"]
    (severe,) = [a for a in ALERTS if a.name == "IsoexecMismatchSevere"]
    for regime, rows in LADDER.items():
        for alert, bound in ((warn, rows["mean_abs_d"][0]), (severe, rows["mean_abs_d"][1])):
            assert f'> {bound} and on (run) isoexec_run_info{{regime="{regime}"}}' in alert.expr


def test_every_alert_has_a_runbook_section_and_no_section_is_an_orphan() -> None:
    assert headings(3) == [alert.name for alert in ALERTS] + list(CAUSES)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda a: a.name)
def test_a_runbook_section_has_its_four_parts_and_each_says_something(alert: Any) -> None:
    parts = re.split(r"^#### (.+)$", section(alert.name), flags=re.MULTILINE)
    assert parts[1::2] == ["Meaning", "Impact", "Diagnosis", "Mitigation"]
    assert all(len(text.split()) >= 5 for text in parts[2::2])


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_has_a_section_that_says_where_to_look_and_what_to_do(cause: str) -> None:
    text = section(cause)
    assert "\nLook at: " in text
    assert "\nDo: " in text


def test_the_runbook_names_no_command_that_does_not_exist() -> None:
    commands = set(re.findall(r"`isoexec ([a-z]+)", RUNBOOK.read_text(encoding="utf-8")))
    known = {"contract", "daemon", "status", "check", "halt", "clear", "mode", "bundle", "demo", "dashboards"}
    assert commands <= known


def test_every_alert_is_seen_to_fire_and_to_be_silent_and_without_data() -> None:
    fires: dict[str, int] = {}
    silent: dict[str, int] = {}
    blind: set[str] = set()
    for path in CASES:
        for case in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]:
            for check in case["alert_rule_test"]:
                name = check["alertname"]
                counter = fires if check["exp_alerts"] else silent
                counter[name] = counter.get(name, 0) + 1
                if "missing data" in case["name"] or "no data at all" in case["name"]:
                    blind.add(name)
    names = {alert.name for alert in ALERTS}
    assert fires.keys() == names
    assert silent.keys() == names - {"IsoexecHeartbeat"}
    assert all(count >= 2 for count in silent.values())
    assert blind == names


@needs_promtool
@pytest.mark.prometheus
@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_promtool_agrees_with_every_case(path: Path) -> None:
    result = promtool("test", "rules", path)
    assert result.returncode == 0, result.stdout + result.stderr


@needs_promtool
@pytest.mark.prometheus
def test_promtool_accepts_the_generated_rules() -> None:
    for name in ("rules.yml", "alerts.yml"):
        result = promtool("check", "rules", "--lint=all", "--lint-fatal", GENERATED / name)
        assert result.returncode == 0, result.stdout + result.stderr


@needs_promtool
@pytest.mark.prometheus
@pytest.mark.parametrize(
    ("old", "new", "file"),
    [
        ('claim="topology",', 'claim="topologies",', "contract"),
        ("> 0.02 and", "> 0.03 and", "mismatch"),
        ("> 0.02 and", ">= 0.02 and", "mismatch"),
        (") > 120", ") > 600", "watching"),
        ("> 0.05", "> 0.5", "watching"),
        ("> 256", "> 255", "shards"),
        ("isoexec_shards_heard > 0", "isoexec_shards_heard >= 0", "shards"),
    ],
)
def test_the_cases_catch_a_wrong_rule(old: str, new: str, file: str, tmp_path: Path) -> None:
    """Negative control: a rule with another bound must not pass."""
    text = alerts_yaml()
    assert old in text
    (tmp_path / "alerts.yml").write_text(text.replace(old, new))
    (tmp_path / "rules.yml").write_text((GENERATED / "rules.yml").read_text())
    case = (HERE / f"{file}-test.yaml").read_text().replace("../../dashboards/generated/", "")
    (tmp_path / "case.yaml").write_text(case)
    assert promtool("test", "rules", tmp_path / "case.yaml").returncode == 1
