# SPDX-License-Identifier: Apache-2.0
"""The six rooms, the links and the wheel are one set, and no room is importable by its bare name."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {"adapters", "contracts", "daemon", "dashboards", "kernels", "probes"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def tracked(*paths: str) -> list[str]:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--", *paths], capture_output=True, text=True, check=True
    )
    return [p for p in listed.stdout.split("\0") if p]


def test_links_wheel_and_typed_rooms_are_one_set() -> None:
    links = {p.name for p in (ROOT / ".src" / "isoexec").iterdir() if p.is_symlink()}
    typed = {p.parent.name for p in ROOT.glob("*/py.typed")}
    wheel = set(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"])
    assert links == typed == wheel == ROOMS


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_link_leads_to_its_room_and_the_bare_name_is_not_ours(room: str) -> None:
    assert (ROOT / ".src" / "isoexec" / room).resolve() == ROOT / room
    found = importlib.util.find_spec(room)
    assert found is None or ROOT not in Path(str(found.origin)).parents


def test_the_wheel_holds_exactly_the_tracked_files_of_the_rooms(tmp_path: Path) -> None:
    build = "import sys, hatchling.build as b; print(b.build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as z:
        held = {n for n in z.namelist() if not n.split("/")[0].endswith(".dist-info")}
    # untracked files of a working copy travel too, so compare the tracked ones from both ends
    ours = {f"isoexec/{p}" for p in tracked(*sorted(ROOMS))}
    assert ours <= held
    assert {n for n in held - ours if not (ROOT / n.removeprefix("isoexec/")).exists()} == set()


@pytest.mark.parametrize(
    "entry",
    [
        e
        for g in ("isoexec.commands", "isoexec.adapters", "vllm.general_plugins")
        for e in entry_points(group=g)
    ],
    ids=lambda e: f"{e.group}:{e.name}",
)
def test_every_entry_point_names_a_file_of_ours(entry: object) -> None:
    value = str(getattr(entry, "value", ""))
    if not value.startswith("isoexec."):
        pytest.skip("another package's entry point")
    module, _, attribute = value.partition(":")
    source = ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py")
    assert source.is_file()
    assert f"def {attribute}(" in source.read_text() or f"class {attribute}" in source.read_text()


def test_no_test_folder_is_a_package() -> None:
    # with an __init__.py, tests/adapters/vllm would answer to `import vllm`
    assert [p for p in tracked("tests") if p.endswith("__init__.py")] == []
