# SPDX-License-Identifier: Apache-2.0
"""Generated files are up to date and reproducible; `config` and `push` do what they say."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from isoexec.dashboards.build import GENERATED, BuildError, build, check, write
from isoexec.dashboards.cli import run
from isoexec.dashboards.config import ConfigError, config_files
from isoexec.dashboards.push import PushError, connect, push


def test_the_files_that_are_checked_in_are_the_ones_that_the_code_builds() -> None:
    assert check(GENERATED) == []
    assert run(["build", "--check"]) == 0


def test_building_again_in_another_process_gives_the_same_bytes(tmp_path: Path) -> None:
    code = f"from isoexec.dashboards.cli import run; run(['build', '--out', {str(tmp_path)!r}])"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, timeout=60)
    for name in build():
        assert (tmp_path / name).read_bytes() == (GENERATED / name).read_bytes()


def test_a_stale_missing_or_foreign_file_fails_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, build())
    assert run(["build", "--check", "--out", str(tmp_path)]) == 0
    (tmp_path / "alerts.yml").write_text("groups: []\n")
    (tmp_path / "rules.yml").unlink()
    (tmp_path / "old.yml").write_text("")
    assert run(["build", "--check", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    for words in ("alerts.yml is out of date", "rules.yml is missing", "old.yml is not generated"):
        assert words in said


def test_a_folder_that_cannot_be_written_is_an_error_of_ours(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(BuildError, match="cannot write"):
        write(blocked, {"a": "b"})


def test_importing_the_builder_needs_neither_grafana_nor_torch() -> None:
    code = (
        "import sys; from isoexec.dashboards import cli; "
        "bad = {'torch', 'grafana_client', 'grafana_foundation_sdk', 'vllm'} & set(sys.modules); "
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


def test_config_points_prometheus_and_grafana_at_the_daemon(tmp_path: Path) -> None:
    args = ["--target", "10.0.0.7:9464", "--alertmanager", "10.0.0.8:9093", "--interval", "3"]
    assert run(["config", "--out", str(tmp_path), "--prometheus-url", "http://p:9090", *args]) == 0
    prometheus = yaml.safe_load((tmp_path / "prometheus.yml").read_text())
    assert prometheus["scrape_configs"] == [
        {"job_name": "isoexec", "static_configs": [{"targets": ["10.0.0.7:9464"]}]}
    ]
    assert prometheus["global"] == {"scrape_interval": "3s", "evaluation_interval": "3s"}
    (source,) = yaml.safe_load((tmp_path / "grafana/provisioning/datasources/isoexec.yml").read_text())[
        "datasources"
    ]
    assert (source["url"], source["jsonData"]["timeInterval"]) == ("http://p:9090", "3s")
    (provider,) = yaml.safe_load((tmp_path / "grafana/provisioning/dashboards/isoexec.yml").read_text())[
        "providers"
    ]
    folder = Path(provider["options"]["path"])
    assert json.loads((folder / "isoexec-overview.json").read_text())["uid"] == "isoexec-overview"


@pytest.mark.prometheus
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on the PATH")
def test_promtool_accepts_the_written_configuration(tmp_path: Path) -> None:
    files = config_files(target="[::1]:9464", out=tmp_path, alertmanager="localhost:9093", runbook="x")
    write(tmp_path, files)
    result = subprocess.run(
        ["promtool", "check", "config", str(tmp_path / "prometheus.yml")], capture_output=True, timeout=60
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("target", ["http://h:1/metrics", "h", "h:", ":9464", "h:0", "h:70000", "h:x"])
def test_an_address_that_cannot_be_scraped_is_refused(target: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        run(["config", "--target", target, "--out", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_an_interval_below_a_second_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 1 second"):
        run(["config", "--target", "h:1", "--interval", "0", "--out", str(tmp_path)])


def test_wrong_usage_is_2() -> None:
    assert run(["bild"]) == 2
    assert run(["config"]) == 2


class NotFoundError(Exception):
    status_code = 404


class Grafana:
    """A stand-in for `GrafanaApi`: keeps what it is given, and knows only that."""

    def __init__(self) -> None:
        self.folders: dict[str, str] = {}
        self.sources: dict[str, Any] = {}
        self.dashboards: dict[str, Any] = {}
        self.answer: Any = {"status": "success", "url": "/d/isoexec-overview"}
        self.folder = self.datasource = self.dashboard = self

    def get_folder(self, uid: str) -> Any:
        return self._get(self.folders, uid)

    def create_folder(self, title: str, uid: str) -> None:
        self.folders[uid] = title

    def get_datasource_by_uid(self, uid: str) -> Any:
        return self._get(self.sources, uid)

    def create_datasource(self, source: Any) -> None:
        self.sources[source["uid"]] = source

    def update_datasource_by_uid(self, uid: str, source: Any) -> None:
        assert uid in self.sources
        self.sources[uid] = source

    def update_dashboard(self, body: Any) -> Any:
        self.dashboards[body["dashboard"]["uid"]] = body
        return self.answer

    @staticmethod
    def _get(held: dict[str, Any], uid: str) -> Any:
        if uid not in held:
            raise NotFoundError(uid)
        return held[uid]


def test_push_creates_all_three_and_pushing_again_changes_nothing() -> None:
    api = Grafana()
    first = push(api, prometheus_url="http://p:9090")
    assert [line.split()[0] for line in first] == ["folder", "data", "dashboard"]
    before = (dict(api.folders), dict(api.sources), dict(api.dashboards))
    assert [line.split()[-1] for line in push(api, prometheus_url="http://p:9090")] == ["updated", "written"]
    assert (api.folders, api.sources, api.dashboards) == before
    body = api.dashboards["isoexec-overview"]
    assert (body["folderUid"], body["overwrite"]) == ("isoexec", True)


def test_push_says_which_step_failed() -> None:
    class Refusing(Grafana):
        def create_folder(self, title: str, uid: str) -> None:
            raise RuntimeError(f"403: permission denied for {title} {uid}")

    with pytest.raises(PushError, match="could not create the folder: 403"):
        push(Refusing(), prometheus_url="http://p:9090")


def test_push_does_not_take_any_answer_for_success() -> None:
    api = Grafana()
    api.answer = {"message": "not found"}
    with pytest.raises(PushError, match="wanted status success, found"):
        push(api, prometheus_url="http://p:9090")


def test_push_without_the_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(PushError, match=r"isoexec\[grafana\] into an environment of its own"):
        connect("http://127.0.0.1:3000", "token")


def test_push_without_a_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAFANA_TOKEN", raising=False)
    with pytest.raises(PushError, match="GRAFANA_TOKEN"):
        run(["push", "--grafana-url", "http://127.0.0.1:3000"])
