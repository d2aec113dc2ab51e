# SPDX-License-Identifier: Apache-2.0
"""Files that point a Prometheus and a Grafana at a daemon: scrape job, rules, data source and dashboard
provisioning.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from isoexec.contracts.errors import IsoExecError
from isoexec.dashboards.alerts import JOB
from isoexec.dashboards.build import build

__all__ = ["DATASOURCE_UID", "FOLDER", "ConfigError", "config_files", "datasource", "host_port"]

DATASOURCE_UID = "isoexec-prometheus"
FOLDER = "IsoExec"


class ConfigError(IsoExecError):
    """An address that cannot be scraped, or an interval that is no duration."""


def host_port(text: str) -> str:
    """Return `host:port`. Raises ConfigError for a URL, a missing port, or a port out of range."""
    host, _, port = text.rpartition(":")
    if not host or "/" in text or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"wanted HOST:PORT such as 127.0.0.1:9464, found {text!r}")
    return text


def datasource(prometheus_url: str, interval_seconds: int) -> dict[str, Any]:
    """Return the Grafana data source of a Prometheus, as both the API and provisioning files take it."""
    return {
        "name": "IsoExec Prometheus",
        "uid": DATASOURCE_UID,
        "type": "prometheus",
        "access": "proxy",
        "url": prometheus_url,
        "isDefault": False,
        # Grafana makes $__rate_interval from this; another value than the scrape interval empties rate panels
        "jsonData": {"timeInterval": f"{interval_seconds}s", "httpMethod": "POST"},
    }


def config_files(
    *,
    target: str,
    out: Path,
    prometheus_url: str = "http://127.0.0.1:9090",
    alertmanager: str | None = None,
    interval_seconds: int = 5,
    runbook: str,
) -> dict[str, str]:
    """Return name -> text for `out`: prometheus.yml with its rule files, and grafana/ with provisioning.

    `target` and `alertmanager` are `host:port`. Raises ConfigError.
    """
    if interval_seconds < 1:
        raise ConfigError(f"wanted an interval of at least 1 second, found {interval_seconds}")
    generated = build(runbook)
    prometheus: dict[str, Any] = {
        "global": {
            "scrape_interval": f"{interval_seconds}s",
            "evaluation_interval": f"{interval_seconds}s",
        },
        "rule_files": ["rules.yml", "alerts.yml"],
        "scrape_configs": [{"job_name": JOB, "static_configs": [{"targets": [host_port(target)]}]}],
    }
    if alertmanager is not None:
        targets = [{"targets": [host_port(alertmanager)]}]
        prometheus["alerting"] = {"alertmanagers": [{"static_configs": targets}]}
    sources = {"apiVersion": 1, "datasources": [datasource(prometheus_url, interval_seconds)]}
    providers = {
        "apiVersion": 1,
        "providers": [
            {
                "name": "isoexec",
                "folder": FOLDER,
                "folderUid": "isoexec",
                "type": "file",
                "disableDeletion": False,
                "allowUiUpdates": False,
                "options": {"path": str((out / "grafana" / "dashboards").resolve())},
            }
        ],
    }
    return {
        "prometheus.yml": yaml.safe_dump(prometheus, sort_keys=False),
        "rules.yml": generated["rules.yml"],
        "alerts.yml": generated["alerts.yml"],
        "grafana/provisioning/datasources/isoexec.yml": yaml.safe_dump(sources, sort_keys=False),
        "grafana/provisioning/dashboards/isoexec.yml": yaml.safe_dump(providers, sort_keys=False),
        "grafana/dashboards/isoexec-overview.json": generated["isoexec-overview.json"],
    }
