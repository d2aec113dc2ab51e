# SPDX-License-Identifier: Apache-2.0
"""The daemon as a job meets it: a real process, its real socket, its HTTP side, and its end by every signal."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isoexec.contracts import wire
from isoexec.contracts.halting import HaltMarker, LeasePage, LeaseState
from isoexec.contracts.schema import Contract, library
from isoexec.daemon.cli import check, status
from isoexec.daemon.journal import Journal

BITS = np.array([-1.0, -2.25, -0.5], np.float32)
SEQUENCES = [([1, 2, 3, 4, 5], 2, BITS), ([9, 8, 7, 6], 1, BITS)]
WEIGHTS = {"w": (1, 2), "v": (3, 4)}


def one_step(engine: Any, trainer: Any, step: int, trained: Any = SEQUENCES, weights: Any = WEIGHTS) -> None:
    """A whole step in which both sides say all that they should."""
    moved = {name: (low + step, high) for name, (low, high) in weights.items()}
    trainer.weights(step, moved)
    engine.weights(step, moved)
    engine.logprobs("engine_decode", step, SEQUENCES)
    trainer.logprobs("trainer_score", step, trained)
    trainer.step(step)


def test_it_answers_and_is_ready_once_started(start: Callable[..., Any], tmp_path: Path) -> None:
    daemon = start(tmp_path)
    assert daemon.json("/healthz")["status"] == "ok"
    assert daemon.json("/readyz")["ready"] is True


def test_it_never_imports_torch() -> None:
    code = (
        "import sys, isoexec.daemon.cli, isoexec.daemon.http, isoexec.daemon.service\n"
        "assert not {'torch', 'triton', 'vllm', 'megatron', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


def test_equal_bits_pass_and_one_changed_bit_is_a_violation(daemon: Any, peer: Callable[..., Any]) -> None:
    engine, trainer = (
        peer(daemon, "engine", run="equal"),
        peer(daemon, "trainer", run="equal", monitor_only=True),
    )
    assert engine.welcome.accepted
    assert trainer.welcome.accepted
    one_step(engine, trainer, 1)
    (window,) = daemon.windows("equal")
    (pair,) = window["pairs"]
    assert (pair["pair"], pair["tokens"], pair["bitwise_equal"]) == (["engine_decode", "trainer_score"], 6, 6)
    assert window["silence"] == []
    assert daemon.json("/api/v1/runs/equal")["outcome"] == "pass"
    assert (
        daemon.metric("isoexec_tokens_bitwise_equal_total", run="equal", pair="engine_decode:trainer_score")
        == 6
    )
    off = BITS.copy()
    off.view(np.int32)[1] ^= 1
    one_step(engine, trainer, 2, [SEQUENCES[0], (*SEQUENCES[1][:2], off)])
    window = daemon.windows("equal", count=2)[1]
    assert window["pairs"][0]["bitwise_equal"] == 5
    run = daemon.json("/api/v1/runs/equal")
    assert run["outcome"] == "violation"
    # a run that only monitors is warned, never halted
    assert {v["action"] for v in run["failing"]} == {"warn"}
    assert LeasePage.open(daemon.state.run("equal").lease).read().state is LeaseState.WARN


def test_a_broken_contract_halts_marks_and_refuses_until_cleared(
    start: Callable[..., Any],
    peer: Callable[..., Any],
    wait_until: Callable[..., Any],
    contract_hello: dict[str, Any],
) -> None:
    daemon = start()
    engine, trainer = (peer(daemon, role, **contract_hello) for role in ("engine", "trainer"))
    assert trainer.welcome.accepted, trainer.welcome.message
    one_step(engine, trainer, 1, [(*SEQUENCES[0][:2], BITS - 1), SEQUENCES[1]])
    lease = LeasePage.open(daemon.state.run("r").lease)
    wait_until(lambda: lease.read().state is LeaseState.HALT, "the halt")
    marker = HaltMarker.read(daemon.state.run("r").path)
    assert marker is not None
    assert (marker.run, marker.step, marker.verdict) == ("r", 1, "violation")
    assert lease.read().rule == marker.rule
    assert not lease.fine()
    assert daemon.metric("isoexec_halted", run="r") == 1
    assert daemon.metric("isoexec_guard_state", run="r", state="halt") == 1
    actions = wait_until(lambda: daemon.json("/api/v1/runs/r")["actions"], "the action in the journal")
    assert actions[0]["action"] == "halt"

    again = peer(daemon, "trainer", rank=1, **contract_hello)
    assert not again.welcome.accepted
    assert "isoexec clear r" in again.welcome.message
    # nor after a restart of the daemon
    daemon.kill()
    daemon = start()
    assert not peer(daemon, "trainer", rank=2, **contract_hello).welcome.accepted
    HaltMarker.clear(daemon.state.run("r").path)
    assert peer(daemon, "trainer", rank=3, **contract_hello).welcome.accepted
    assert LeasePage.open(daemon.state.run("r").lease).fine()


def test_a_fact_that_breaks_between_steps_halts_before_the_next_step_begins(
    daemon: Any, peer: Callable[..., Any], wait_until: Callable[..., Any], contract_hello: dict[str, Any]
) -> None:
    trainer = peer(daemon, "trainer", run="facts", **contract_hello)
    degrees = {"TP": 2, "SP": 1, "PP": 1, "CP": 1, "EP": 1, "ETP": 1, "DP": 1}
    claimed = Contract.load(library("qwen3-dense-cpu")).claims.environment
    switches, versions = dict(claimed.switches), {one.name: "1" for one in claimed.versions}

    def attest(**other: int) -> None:
        trainer.send(
            wire.Attestation,
            reason="sync",
            step=3,
            weight_version=4,
            topology={**degrees, **other},
            environment={"arch": "cpu", "OMP_NUM_THREADS": "1", **versions, **switches},
            identities=contract_hello["identities"],
        )

    lease = LeasePage.open(daemon.state.run("facts").lease)
    attest()
    # half of the ranks have spoken: nothing is missing yet, and nothing is halted for it
    trainer.weights(4, {"w": (1, 2)}, numel={"w": 8}, total={"w": 16})
    seen = {"run": "facts", "role": "trainer", "type": "weights"}
    wait_until(lambda: daemon.metric("isoexec_messages_received_total", **seen), "the weights")
    assert lease.read().state is LeaseState.OK
    attest(CP=2)
    wait_until(lambda: lease.read().state is LeaseState.HALT, "the halt")
    marker = HaltMarker.read(daemon.state.run("facts").path)
    assert marker is not None
    assert (marker.rule, marker.verdict) == ("topology", "violation")
    assert "CP" in str(marker.evidence)
    (window,) = daemon.windows("facts")
    assert window["between_steps"]
    assert daemon.metric("isoexec_claim", run="facts", claim="topology", outcome="violation") == 1
    assert daemon.metric("isoexec_claim", run="facts", claim="sampling", outcome="pass") == 0


def test_a_marker_of_the_guard_is_seen_and_clearing_it_is_a_new_start(
    daemon: Any, peer: Callable[..., Any], wait_until: Callable[..., Any]
) -> None:
    peer(daemon, "engine", run="guard")
    directory = daemon.state.run("guard")
    lease = LeasePage.open(directory.lease)
    assert lease.fine()
    HaltMarker(run="guard", step=2, rule="lease_lost", cause="", verdict="unknown").write(directory.path)
    wait_until(lambda: lease.read().state is LeaseState.HALT, "the daemon to see the marker")
    assert daemon.metric("isoexec_halted", run="guard") == 1
    assert not peer(daemon, "trainer", run="guard").welcome.accepted
    HaltMarker.clear(directory.path)
    # the engine of before is still connected, and does not bring its halt along
    assert peer(daemon, "trainer", run="guard").welcome.accepted
    assert lease.fine()
    assert daemon.metric("isoexec_halted", run="guard") == 0


def test_a_driver_that_comes_first_does_not_declare_the_run(
    daemon: Any, peer: Callable[..., Any], contract_hello: dict[str, Any]
) -> None:
    assert peer(daemon, "driver", run="driven").welcome.accepted
    assert peer(daemon, "trainer", run="driven", **contract_hello).welcome.accepted
    assert daemon.metric("isoexec_run_info", run="driven", mode="contract") == 1
    refused = peer(daemon, "engine", run="driven").welcome
    assert not refused.accepted
    assert refused.differences[0][0] == "contract"


def test_another_contract_is_refused_with_the_fields(
    daemon: Any, peer: Callable[..., Any], contract_hello: dict[str, Any]
) -> None:
    trainer = peer(daemon, "trainer", run="another", **contract_hello)
    other = Contract.load(library("qwen3-dense-cpu")).to_dict()
    for binding in other["composition"]:  # type: ignore[attr-defined]
        if binding["region"] == "attention":
            binding["constants"]["kv_segment"] = 64
    engine = peer(daemon, "engine", run="another", monitor_only=False, contract=other)
    assert not engine.welcome.accepted
    (difference,) = engine.welcome.differences
    assert difference[0].endswith("kv_segment")
    assert list(difference[1:]) == [64, 32]
    # the trainer is told at once, not at the end of a step that must not begin
    marker = HaltMarker.read(daemon.state.run("another").path)
    assert marker is not None
    assert (marker.rule, marker.verdict) == ("handshake", "violation")
    # a lie about the digest is not believed
    peer(daemon, "trainer", run="lied-to", **contract_hello)
    liar = peer(daemon, "engine", run="lied-to", rank=1, **{**contract_hello, "contract": other})
    assert not liar.welcome.accepted
    assert "identities.numerical_policy" in liar.welcome.message
    trainer.step(1)
    (window,) = daemon.windows("another")
    assert any(row["path"].endswith("kv_segment") and row["engine"] == 64 for row in window["handshake"])


def test_a_contract_that_changes_between_two_syncs_halts_and_its_fields_are_named(
    daemon: Any, peer: Callable[..., Any], wait_until: Callable[..., Any], contract_hello: dict[str, Any]
) -> None:
    trainer = peer(daemon, "trainer", run="edited", **contract_hello)
    contract = Contract.load(library("qwen3-dense-cpu"))
    other = contract.to_dict()
    for binding in other["composition"]:  # type: ignore[attr-defined]
        if binding["region"] == "attention":
            binding["constants"]["kv_segment"] = 64
    degrees = {"TP": 1, "SP": 1, "PP": 1, "CP": 1, "EP": 1, "ETP": 1, "DP": 1}
    claimed = contract.claims.environment
    switches, versions = dict(claimed.switches), {one.name: "1" for one in claimed.versions}

    def attest(**fields: Any) -> None:
        trainer.send(
            wire.Attestation,
            reason="sync",
            step=1,
            weight_version=1,
            topology=degrees,
            environment={"arch": "cpu", "OMP_NUM_THREADS": "1", **versions, **switches},
            **fields,
        )

    lease = LeasePage.open(daemon.state.run("edited").lease)
    attest(identities=contract.identities.to_dict())
    trainer.weights(1, {"w": (1, 2)}, numel={"w": 8}, total={"w": 16})
    seen = {"run": "edited", "role": "trainer", "type": "weights"}
    wait_until(lambda: daemon.metric("isoexec_messages_received_total", **seen), "the weights")
    assert lease.read().state is LeaseState.OK
    attest(identities=Contract.from_dict(other).identities.to_dict(), contract=other)
    wait_until(lambda: lease.read().state is LeaseState.HALT, "the halt")
    marker = HaltMarker.read(daemon.state.run("edited").path)
    assert marker is not None
    assert (marker.rule, marker.verdict) == ("handshake", "violation")
    first = marker.evidence["first"][0]
    assert str(first["path"]).startswith("composition[attention].constants.kv_segment (")
    assert (first["engine"], first["trainer"]) == (64, 32)
    assert "composition[attention].constants.kv_segment" in (daemon.state_dir / "daemon.log").read_text()


def test_a_killed_daemon_leaves_a_whole_journal_and_goes_on(
    start: Callable[..., Any], peer: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = start()
    engine, trainer = peer(daemon, "engine"), peer(daemon, "trainer")
    for step in (1, 2, 3):
        one_step(engine, trainer, step)
        daemon.windows(count=step)
    # more is on its way when it dies
    for step in range(4, 40):
        one_step(engine, trainer, step)
    daemon.kill()
    database = sqlite3.connect(f"file:{daemon.state.journal}?mode=ro", uri=True)
    assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    # no window without its verdicts
    bare = "SELECT count(*) FROM windows WHERE id NOT IN (SELECT window FROM verdicts)"
    assert database.execute(bare).fetchone() == (0,)
    database.close()

    assert status(["--state-dir", str(daemon.state_dir)]) == 0
    told = capsys.readouterr().out
    assert "does not answer" in told
    assert "6 of 6 tokens have the same bits" in told
    assert check([str(daemon.state.journal)]) == 0

    journal = Journal.open(daemon.state.journal)
    before = len(journal.windows("r"))
    journal.close()
    daemon = start()
    peer(daemon, "engine"), peer(daemon, "trainer")
    rows = daemon.json("/api/v1/runs/r/windows")["windows"]
    assert len(rows) == before
    assert "session resumed" in (daemon.state_dir / "daemon.log").read_text()


def test_a_stopped_daemon_loses_its_leases_and_takes_them_up_again(
    start: Callable[..., Any], peer: Callable[..., Any], wait_until: Callable[..., Any]
) -> None:
    daemon = start()
    peer(daemon, "trainer", policy="fail_closed")
    lease = LeasePage.open(daemon.state.run("r").lease)
    assert lease.fine()
    daemon.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    wait_until(lambda: not lease.fine(), "the lease to run out", 5)
    assert time.monotonic() - began < 2.6
    assert lease.read().state is LeaseState.OK  # what it said last; only the deadline tells
    assert lease.read().policy.name == "FAIL_CLOSED"
    daemon.process.send_signal(signal.SIGCONT)
    wait_until(lease.fine, "the lease to be renewed", 5)


def test_a_run_that_said_goodbye_is_not_silent(
    daemon: Any, peer: Callable[..., Any], wait_until: Callable[..., Any]
) -> None:
    sides = [peer(daemon, role, run="gone") for role in ("engine", "trainer")]
    heard = {"run": "gone", "role": "engine"}
    assert daemon.metric("isoexec_last_message_timestamp_seconds", **heard) is not None
    for side in sides:
        side.bye()
    # the alert on silence reads the age of this series: with it gone nobody is paged for a job that ended
    wait_until(lambda: daemon.metric("isoexec_last_message_timestamp_seconds", **heard) is None, "the end")
    assert daemon.metric("isoexec_halted", run="gone") == 0


def test_sigterm_is_a_clean_stop(start: Callable[..., Any], peer: Callable[..., Any]) -> None:
    daemon = start()
    peer(daemon, "trainer")
    daemon.process.terminate()
    assert daemon.process.wait(10) == 0
    assert not daemon.state.socket.exists()
    assert not daemon.state.daemon.exists()


def test_two_daemons_do_not_share_a_state_directory(start: Callable[..., Any]) -> None:
    start()
    with pytest.raises(RuntimeError, match="another daemon"):
        start()


def test_a_side_that_says_nothing_is_unknown_and_named(daemon: Any, peer: Callable[..., Any]) -> None:
    peer(daemon, "engine", run="silent")
    trainer = peer(daemon, "trainer", run="silent")
    trainer.logprobs("trainer_score", 1, SEQUENCES)
    trainer.step(1)
    (window,) = daemon.windows("silent")
    assert {(s["role"], s["what"]) for s in window["silence"]} == {
        ("engine", "logprobs"),
        ("engine", "weights"),
        ("trainer", "weights"),
    }
    assert window["pairs"][0]["unpaired"] == {"trainer": 6}
    assert daemon.json("/api/v1/runs/silent")["outcome"] in ("unknown", "violation")
    assert daemon.metric("isoexec_verdict", run="silent", outcome="pass") == 0
    assert (
        daemon.metric("isoexec_tokens_unpaired_total", run="silent", role="trainer", reason="only_trainer")
        == 6
    )


def test_one_rank_that_hangs_is_silent_though_the_others_speak(
    start: Callable[..., Any], peer: Callable[..., Any], wait_until: Callable[..., Any]
) -> None:
    daemon = start(silence_seconds={"trainer": 0.5})
    speaks, _ = peer(daemon, "trainer", rank=0), peer(daemon, "trainer", rank=1)

    def windows() -> list[dict[str, Any]]:
        speaks.step(1)
        rows = daemon.json("/api/v1/runs/r/windows")["windows"]
        return [
            silence
            for row in rows
            for silence in row["window"]["silence"]
            if (silence["role"], silence["what"]) == ("trainer", "probe")
        ]

    (silence, *_) = wait_until(windows, "the silence")
    assert silence["age_seconds"] > 0.5


def test_what_never_paired_says_why_wherever_it_is_told(
    daemon: Any, peer: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    engine, trainer = peer(daemon, "engine", run="why"), peer(daemon, "trainer", run="why")
    bits = np.full(10, -1.0, np.float32)
    anew, cut, stale, dropped = ([number, *range(number, number + 10)] for number in (100, 200, 300, 400))
    engine.logprobs("engine_decode", 1, [(ids, 1, bits) for ids in (anew, cut, dropped)])
    engine.logprobs("engine_decode", 1, [(stale, 1, bits)], weight_version=0)
    one_step(
        engine, trainer, 1,
        [*SEQUENCES, ([*anew[:5], 7, *anew[6:]], 1, bits), (cut[:7], 1, bits[:6]), (stale, 1, bits)],
    )  # fmt: skip
    (window,) = daemon.windows("why")
    lost = {(one["role"], one["reason"]): one["tokens"] for one in window["unpaired"]}
    assert lost == {
        ("engine", "ids"): 10,
        ("engine", "length"): 10,
        ("engine", "version"): 10,
        ("trainer", "ids"): 10,
        ("trainer", "length"): 6,
        ("trainer", "version"): 10,
        ("engine", "only_rollout"): 10,
    }
    assert window["pairs"][0]["unpaired"] == {"engine": 40, "trainer": 26}
    for (role, reason), tokens in lost.items():
        labels = {"run": "why", "role": role, "reason": reason}
        assert daemon.metric("isoexec_tokens_unpaired_total", **labels) == tokens
    status(["--state-dir", str(daemon.state_dir), "why"])
    told = capsys.readouterr().out
    assert (
        "unpaired, engine: 10 tokens, ids: token ids differ: tokenised anew, or under another prompt" in told
    )
    assert "Tokens of the last window that found no partner" in daemon.text("/runs/why")
    verdicts = daemon.json("/api/v1/runs/why")["verdicts"]
    (verdict,) = [one for one in verdicts if one["rule"] == "unpaired"]
    assert "of 40 tokens of the engine, 10 because" in verdict["message"]


def test_lost_messages_are_counted_from_the_numbers(daemon: Any, peer: Callable[..., Any]) -> None:
    engine, trainer = peer(daemon, "engine", run="lost"), peer(daemon, "trainer", run="lost")
    engine.seq += 4
    one_step(engine, trainer, 1)
    (window,) = daemon.windows("lost")
    assert window["dropped"] == 4
    assert daemon.metric("isoexec_messages_dropped_total", run="lost", role="engine") == 4


def test_weights_that_did_not_arrive_are_stale(daemon: Any, peer: Callable[..., Any]) -> None:
    engine, trainer = peer(daemon, "engine", run="stale"), peer(daemon, "trainer", run="stale")
    for step, engine_has in ((1, {"w": (1, 1)}), (2, {"w": (1, 1)})):
        trainer.weights(step, {"w": (step, 1)})
        engine.weights(step, engine_has)
        engine.logprobs("engine_decode", step, SEQUENCES)
        trainer.logprobs("trainer_score", step, SEQUENCES)
        trainer.step(step)
        window = daemon.windows("stale", count=step)[-1]
    assert window["weights"] == [{"name": "w", "kind": "stale", "engine_version": 1, "trainer_version": 2}]
    assert daemon.metric("isoexec_claim", run="stale", claim="weights", outcome="violation") == 1


def test_raw_pairs_are_kept_and_bounded(
    start: Callable[..., Any], peer: Callable[..., Any], wait_until: Callable[..., Any]
) -> None:
    daemon = start(sample_windows=2)
    engine, trainer = peer(daemon, "engine"), peer(daemon, "trainer")
    for step in (1, 2, 3):
        one_step(engine, trainer, step)
        daemon.windows(count=step)
    folder = daemon.state.run("r").path / "samples"
    wait_until(
        lambda: (
            folder.is_dir()
            and sorted(p.name[:15] for p in folder.glob("step*")) == ["step-0000000002", "step-0000000003"]
        ),
        "two files",
    )
    newest = max(folder.glob("step*"))
    with np.load(newest) as held:
        assert held["engine_decode:trainer_score/first"].tobytes() == np.tile(BITS, 2).tobytes()
        assert held["engine_decode:trainer_score/position"].tolist() == [2, 3, 4, 1, 2, 3]
        assert held["engine_decode:trainer_score/digest"].shape == (6, 16)


def test_a_new_start_of_the_job_is_a_session_of_its_own(
    daemon: Any, peer: Callable[..., Any], wait_until: Callable[..., Any]
) -> None:
    for session in (1, 2):
        engine, trainer = (peer(daemon, role, run="sessions", rank=session) for role in ("engine", "trainer"))
        one_step(engine, trainer, 1)
        rows = daemon.windows("sessions", count=session)
        assert [row["step"] for row in rows] == [1] * session
        engine.bye()
        trainer.bye()
        wait_until(lambda: daemon.json("/api/v1/runs/sessions")["ended"], "the end of the session")


@pytest.mark.parametrize(
    "stream",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<4sII", b"IXF1", 1 << 30, 0),
        struct.pack("<4sII", b"IXF1", 10, 1 << 31),
        struct.pack("<4sII", b"IXF1", 3, 0) + b"\xc1\xc1\xc1",
        b"".join(map(bytes, wire.encode_frame(wire.Bye(run="r", role="engine", source="s")))),
        b"".join(
            map(bytes, wire.encode_frame(wire.Welcome(run="r", role="daemon", source="s", accepted=True)))
        ),
    ],
)
def test_a_malformed_stream_is_closed_counted_and_hurts_nobody(
    daemon: Any, unread_socket: socket.socket, peer: Callable[..., Any], stream: bytes
) -> None:
    before = daemon.metric("isoexec_decode_errors_total")
    unread_socket.sendall(stream)
    unread_socket.settimeout(10)
    with contextlib.suppress(ConnectionResetError):
        assert unread_socket.recv(1) == b""
    assert daemon.metric("isoexec_decode_errors_total") == before + 1
    one = peer(daemon, "engine", run="well")
    assert one.welcome.accepted


def test_a_stream_may_not_speak_for_another_run_or_an_unknown_source(
    daemon: Any, peer: Callable[..., Any]
) -> None:
    one = peer(daemon, "engine", run="mine")
    one.run = "other"
    one.step(1)
    assert one.closed()
    two = peer(daemon, "engine", run="mine", rank=7)
    two.source = "somebody:1:0"
    two.step(1)
    assert two.closed()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"run": "../up"}, "run name"),
        ({"regime": "bf17"}, "unknown regime"),
        ({"monitor_only": False}, "ISOEXEC_CONTRACT"),
        ({"monitor_only": False, "contract": {"name": "x"}}, "contract"),
    ],
)
def test_a_hello_that_cannot_be_used_is_answered_with_the_reason(
    daemon: Any, peer: Callable[..., Any], changes: dict[str, Any], says: str
) -> None:
    welcome = peer(daemon, "trainer", **{"run": "refused", **changes}).welcome
    assert not welcome.accepted
    assert says in welcome.message
    assert not (daemon.state_dir / "up").exists()


def test_a_stream_cut_inside_a_frame_is_counted(
    daemon: Any, peer: Callable[..., Any], wait_until: Callable[..., Any]
) -> None:
    before = daemon.metric("isoexec_decode_errors_total")
    one = peer(daemon, "engine", run="cut")
    one.stream.sendall(b"IXF1\x10")
    one.stream.close()
    wait_until(lambda: daemon.metric("isoexec_decode_errors_total") == before + 1, "the count")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_another_user_is_turned_away_by_the_kernels_word(daemon: Any) -> None:
    assert daemon.state.socket.stat().st_mode & 0o777 == 0o600
    code = (
        "import os, socket, sys\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX); s.settimeout(10)\n"
        "s.connect(sys.argv[1])\n"
        "print(s.recv(1) == b'')\n"
    )
    # open every door but the last: a second name for the socket where anyone may go, and mode 0666
    directory = daemon.state_dir
    reach = Path("/tmp") / f"isoexec-peer-{os.getpid()}"
    reach.mkdir(mode=0o755)
    link = reach / "isoexec.sock"
    try:
        os.link(daemon.state.socket, link)
        link.chmod(0o666)
        found = subprocess.run(
            [sys.executable, "-P", "-c", code, str(link)], capture_output=True, text=True, timeout=30
        )
        assert found.stdout.strip() == "True", found.stderr
    finally:
        shutil.rmtree(reach)
        daemon.state.socket.chmod(0o600)
    assert "peer refused" in (directory / "daemon.log").read_text()


@pytest.mark.prometheus
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_the_metrics_clean(
    daemon: Any, peer: Callable[..., Any], contract_hello: dict[str, Any]
) -> None:
    engine, trainer = (peer(daemon, role, run="prom", **contract_hello) for role in ("engine", "trainer"))
    one_step(engine, trainer, 1)
    daemon.windows("prom")
    text = daemon.text("/metrics")
    found = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_msgpack_bombs_cost_a_connection_and_nothing_more(daemon: Any, unread_socket: socket.socket) -> None:
    deep = b"\x91" * 100_000 + b"\xc0"
    unread_socket.sendall(struct.pack("<4sII", b"IXF1", len(deep), 0) + deep)
    unread_socket.settimeout(10)
    with contextlib.suppress(ConnectionResetError):
        assert unread_socket.recv(1) == b""
    assert daemon.json("/healthz")["status"] == "ok"
