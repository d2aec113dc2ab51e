# SPDX-License-Identifier: Apache-2.0
"""Put folder, data source and dashboard into a running Grafana through its HTTP API; running it again
changes nothing.

`grafana-client` is an optional extra, imported on use: it replaces urllib3 by a fork, so it belongs into an
environment of its own, never beside an engine. File provisioning (`isoexec dashboards config`) needs neither.
"""

from __future__ import annotations

import importlib
from typing import Any

from isoexec.contracts.errors import IsoExecError
from isoexec.dashboards.config import DATASOURCE_UID, FOLDER, datasource
from isoexec.dashboards.overview import overview

__all__ = ["PushError", "connect", "push"]

FOLDER_UID = "isoexec"
_MISSING = 404


class PushError(IsoExecError):
    """Grafana could not be reached, refused the credentials, or refused what was sent."""


def connect(url: str, token: str) -> Any:
    """Return a `grafana_client.GrafanaApi`. Raises PushError without the extra, or for an address that is
    none.
    """
    try:
        client = importlib.import_module("grafana_client")
    except ModuleNotFoundError as error:
        if error.name != "grafana_client":
            raise
        raise PushError(
            "wanted the package grafana-client, found none; install isoexec[grafana] into an environment of its own "
            "(it replaces urllib3), or use `isoexec dashboards config`, which needs no client"
        ) from error
    try:
        return client.GrafanaApi.from_url(url, credential=client.TokenAuth(token=token))
    except (ValueError, AttributeError) as error:
        raise PushError(f"wanted the address of a Grafana, found {url!r}: {error}") from error


def push(api: Any, *, prometheus_url: str, interval_seconds: int = 5) -> list[str]:
    """Create or update all three through `api`; return one line for each thing done.

    Raises PushError with the step that failed and what Grafana said.
    """
    done: list[str] = []
    source = datasource(prometheus_url, interval_seconds)
    if _call("read the folder", api.folder.get_folder, FOLDER_UID) is None:
        _call("create the folder", api.folder.create_folder, FOLDER, FOLDER_UID)
        done.append(f"folder {FOLDER} created")
    if _call("read the data source", api.datasource.get_datasource_by_uid, DATASOURCE_UID) is None:
        _call("create the data source", api.datasource.create_datasource, source)
        done.append(f"data source {source['name']} created")
    else:
        _call("update the data source", api.datasource.update_datasource_by_uid, DATASOURCE_UID, source)
        done.append(f"data source {source['name']} updated")
    body: dict[str, Any] = {
        "dashboard": overview(),
        "folderUid": FOLDER_UID,
        "overwrite": True,
        "message": "isoexec dashboards push",
    }
    answer = _call("write the dashboard", api.dashboard.update_dashboard, body)
    if not isinstance(answer, dict) or answer.get("status") != "success":
        raise PushError(f"could not write the dashboard: wanted status success, found {answer!r}")
    done.append(f"dashboard {answer.get('url', body['dashboard']['uid'])} written")
    return done


def _call(what: str, call: Any, *args: Any) -> Any:
    """Return the answer, or None where Grafana says that the thing does not exist."""
    try:
        return call(*args)
    except Exception as error:  # the client's errors share no base that exists without it
        if what.startswith("read") and getattr(error, "status_code", None) == _MISSING:
            return None
        raise PushError(f"could not {what}: {error}") from error
