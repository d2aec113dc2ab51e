# SPDX-License-Identifier: Apache-2.0
"""Settings, the journal, and what `status`, `check` and the page make of it."""

from __future__ import annotations

import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from isoexec.contracts.halting import HaltMarker, StateDirectory
from isoexec.contracts.verdict import RuleHistory, evaluate
from isoexec.contracts.window import HISTOGRAM_EDGES, PairStats, Silence, Window
from isoexec.daemon.cli import check, run, status
from isoexec.daemon.config import Config, ConfigError
from isoexec.daemon.journal import Journal, JournalError
from isoexec.daemon.judge import claim_outcomes, lease_state, rules_for
from isoexec.daemon.page import plot, run_page, runs_page
from isoexec.daemon.views import run_view, runs_view


def window(step: int = 1, equal: int = 10, **changes: Any) -> Window:
    names = ("mean_d", "mean_abs_d", "max_abs_d", "p99_abs_d", "k1", "k3", "rho_z")
    numbers: dict[str, Any] = dict.fromkeys(names, 0.0)
    pair = PairStats(
        pair=("engine_decode", "trainer_score"),
        tokens=10,
        bitwise_equal=equal,
        rho_mean=1.0,
        histogram=(10, *[0] * len(HISTOGRAM_EDGES)),
        **numbers,
    )
    fields: dict[str, Any] = {
        "run": "r",
        "regime": "bitwise",
        "monitor_only": True,
        "step": step,
        "weight_version": step,
        "pairs": (pair,),
    }
    return Window(**{**fields, **changes})


def journal_of(path: Path, *windows: Window, name: str = "r") -> Path:
    state = StateDirectory(path).make()
    journal = Journal.create(state.journal)
    rules = [rule.to_dict() for rule in rules_for("bitwise")]
    session = journal.start_run(
        name, regime="bitwise", monitor_only=True, policy="fail_open", data={"rules": rules}
    )
    history = RuleHistory()
    for one in windows:
        verdicts = evaluate(rules_for(one.regime), one, history)
        history = history.after(verdicts)
        journal.add_window(session, one, verdicts)
    journal.close()
    return state.journal


def test_a_window_comes_back_from_the_journal_as_it_was(tmp_path: Path) -> None:
    odd = window(
        silence=(Silence(role="engine", what="weights", age_seconds=None),),
        pairs=(PairStats(pair=("engine_decode", "trainer_fwd")),),
    )
    journal = Journal.open(journal_of(tmp_path, odd))
    (row,) = journal.windows("r")
    back = Window.from_dict(row["window"])
    assert back.silence == odd.silence
    assert math.isnan(back.pairs[0].mean_abs_d)
    assert back.to_dict() == odd.to_dict()


def test_the_journal_is_private_and_refuses_what_it_is_not(tmp_path: Path) -> None:
    path = journal_of(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(JournalError, match="no journal"):
        Journal.open(tmp_path / "other")
    (tmp_path / "text").write_text("not a database at all, but long enough to be looked at" * 10)
    with pytest.raises(JournalError, match="cannot be read"):
        Journal.open(tmp_path / "text")
    database = sqlite3.connect(tmp_path / "newer")
    database.execute("PRAGMA user_version=99")
    database.commit()
    database.close()
    for opened in (Journal.open, Journal.create):
        with pytest.raises(JournalError, match="format"):
            opened(tmp_path / "newer")


def test_a_writer_killed_at_any_moment_leaves_whole_transactions(tmp_path: Path) -> None:
    path = journal_of(tmp_path)
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from isoexec.contracts.window import Window\n"
        "from isoexec.contracts.verdict import RuleHistory, evaluate\n"
        "from isoexec.daemon.journal import Journal\n"
        "from isoexec.daemon.judge import rules_for\n"
        "journal = Journal.create(Path(sys.argv[1]))\n"
        "step = 0\n"
        "while True:\n"
        "    step += 1\n"
        "    one = Window(run='r', regime='bitwise', monitor_only=True, step=step, weight_version=step)\n"
        "    journal.add_window(1, one, evaluate(rules_for('bitwise'), one, RuleHistory()))\n"
        "    print(step, flush=True)\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-P", "-c", code, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    for _ in range(20):
        said = int(writer.stdout.readline())
    writer.send_signal(signal.SIGKILL)
    said = max([said, *map(int, writer.stdout.read().split())])
    writer.wait()
    writer.stdout.close()
    journal = Journal.open(path)
    steps = [row["window"]["step"] for row in journal.windows("r", limit=100_000)]
    # what was said to be written is there; at most one more that it could not say any more
    assert steps == list(range(1, len(steps) + 1))
    assert said <= len(steps) <= said + 1
    rules = len(journal.last_verdicts("r"))
    assert len(journal.verdicts("r", limit=1_000_000)) == rules * len(steps)
    journal.close()


@pytest.mark.parametrize(
    ("windows", "code"),
    [
        ([window(1), window(2)], 0),
        ([window(1), window(2, equal=9)], 1),
        ([window(1, silence=(Silence(role="engine", what="weights", age_seconds=None),))], 3),
        ([], 2),
    ],
)
def test_check_judges_again_and_tells_by_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], windows: list[Window], code: int
) -> None:
    path = journal_of(tmp_path, *windows)
    assert check([str(path)]) == code
    assert check([str(tmp_path), "--json"]) == code  # the directory will do
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert {line["rule"] for line in lines} >= ({"unequal"} if windows else set())


def test_check_takes_other_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = journal_of(tmp_path, window(1, equal=9))
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules:\n  - {name: lax, signal: unequal_tokens, bound: 5, action: halt}\n")
    assert check([str(path), "--rules", str(rules)]) == 0
    rules.write_text("rules:\n  - {name: lax, signal: nonsense}\n")
    assert check([str(path), "--rules", str(rules)]) == 2
    assert "nonsense" in capsys.readouterr().err


def test_status_without_a_daemon_reads_the_journal_and_the_markers_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(["--state-dir", str(tmp_path)]) == 2
    capsys.readouterr()
    journal_of(tmp_path, window(4))
    assert status(["--state-dir", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["daemon"] == "dead"
    assert (told["runs"][0]["step"], told["runs"][0]["outcome"]) == (4, "pass")
    HaltMarker(run="m", step=1, rule="canary", cause="c", verdict="violation").write(tmp_path / "runs" / "m")
    assert status(["--state-dir", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "does not answer" in text
    assert "m: HALTED" in text
    assert "isoexec clear m" in text
    assert status(["--state-dir", str(tmp_path), "r"]) == 0
    assert status(["--state-dir", str(tmp_path), "nobody"]) == 2


def test_a_note_of_a_dead_daemon_does_not_fool_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal_of(tmp_path, window())
    (tmp_path / "daemon.json").write_text(json.dumps({"pid": os.getpid(), "http": "http://127.0.0.1:9"}))
    assert status(["--state-dir", str(tmp_path)]) == 0
    assert "does not answer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nonsense: 1", "unknown setting 'nonsense'"),
        ("settle_seconds: soon", "settle_seconds"),
        ("window_seconds: -1", "window_seconds"),
        ("escalation: {enabled: true, when: now}", "unknown setting 'when'"),
        ("silence_seconds: {engines: 3}", "silence_seconds"),
        ("log: loud", "log"),
        ("- a list", "map of settings"),
        ("{", "cannot be read"),
        ("max_runs: true", "max_runs"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        Config.load(path, state_dir=tmp_path)


def test_flags_win_over_the_file_and_the_rest_keeps_its_default(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("http_port: 1234\nlog: json\nsilence_seconds: {engine: 5}\nescalation: {enabled: true}\n")
    config = Config.load(path, state_dir=tmp_path, http_port=0, log=None)
    assert (config.http_port, config.log, config.escalation.enabled) == (0, "json", True)
    assert (config.silence_seconds["engine"], config.silence_seconds["trainer"]) == (5, 1800.0)


@pytest.mark.parametrize("argv", [["--http", "nowhere"], ["--config", "/nonexistent/settings.yaml"]])
def test_a_daemon_that_cannot_start_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    assert run(["--state-dir", str(tmp_path), *argv]) == 1
    assert "isoexec daemon: " in capsys.readouterr().err


def test_an_unknown_that_is_only_recorded_leaves_the_lease_ok_and_other_unknowns_warn() -> None:
    rules = rules_for("bitwise")
    assert lease_state(evaluate(rules, window(), RuleHistory())).name == "OK"
    silent = window(silence=(Silence(role="engine", what="weights", age_seconds=3.0),))
    # never UNKNOWN: that is what a lost daemon looks like, and the policy would act on it
    assert lease_state(evaluate(rules, silent, RuleHistory())).name == "WARN"
    assert lease_state([]).name == "WARN"


def test_claims_without_a_contract_are_unknown_not_kept() -> None:
    assert claim_outcomes(window()) == {
        "handshake": "unknown",
        "topology": "unknown",
        "regions": "unknown",
        "canaries": "unknown",
        "weights": "pass",
        "sampling": "pass",
        "environment": "unknown",
    }
    assert set(claim_outcomes(window(monitor_only=False)).values()) == {"pass"}


def test_the_page_is_well_formed_and_escapes_what_a_run_says(tmp_path: Path) -> None:
    evil = '<script>alert("x")</script>'
    state = StateDirectory(tmp_path)
    path = journal_of(tmp_path, *(window(step, equal=10 - step % 2) for step in range(1, 6)))
    HaltMarker(run="r", step=5, rule=evil, cause=evil, verdict="violation").write(state.run("r").path)
    journal = Journal.open(path)
    found = run_view(state, journal, "r")
    assert found is not None
    found["processes"] = {evil: {"role": evil, "versions": {"torch": evil}}}
    steps = [{"step": step, "seconds": {"step": 1.5, evil: float("nan")}} for step in range(5)]
    page = run_page(found, journal.windows("r"), steps)
    assert "<script" not in page
    assert "Halted" in page
    assert page.count("<svg") == 3
    for start in (i for i in range(len(page)) if page.startswith("<svg", i)):
        ET.fromstring(page[start : page.index("</svg>", start) + 6])  # noqa: S314 - our own text
    assert "halted" in runs_page(runs_view(state, journal))
    assert "No run" in runs_page([])
    journal.close()


@pytest.mark.parametrize(
    "points", [[], [(1, float("nan"))], [(1, 0.0)], [(1, 2.0), (2, float("inf")), (3, 4.0)]]
)
def test_a_plot_copes_with_little_or_odd_data(points: list[tuple[float, float]]) -> None:
    drawn = plot("t", [("a", points)])
    assert ("<svg" in drawn) == any(math.isfinite(y) for _, y in points)
    assert "nan" not in drawn
    assert "inf" not in drawn
