# SPDX-License-Identifier: Apache-2.0
"""The console script `isoexec`: finds a subcommand by entry point and loads its module only when it runs.

A subcommand is an entry point of group `isoexec.commands` naming a function `(argv: list[str]) -> int`. The list of
commands shows the first line of that function's docstring, read from its source without importing it. The commands of
this folder are found without the entry points, which take longer to read than a contract.

Exit codes: what the subcommand returns; 1 for an error of ours, 2 for an unknown command, 130 when interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING

from isoexec.contracts.errors import IsoExecError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint
    from pathlib import Path

__all__ = ["GROUP", "OWN", "main"]

GROUP = "isoexec.commands"
OWN = {
    "contract": "isoexec.contracts.cli:run",
    "halt": "isoexec.contracts.cli_halting:halt",
    "clear": "isoexec.contracts.cli_halting:clear",
    "mode": "isoexec.contracts.cli_halting:mode",
}
"""The commands of this folder, as the package's entry points name them too."""


def entry_points(*, group: str) -> Iterable[EntryPoint]:
    """Return the installed entry points of a group."""
    from importlib import metadata

    return metadata.entry_points(group=group)


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand and return its exit code; errors of ours become one line on stderr."""
    args = sys.argv[1:] if argv is None else argv
    try:
        code = _dispatch(args)
        sys.stdout.flush()
    except IsoExecError as error:
        print("isoexec: " + " ; ".join(str(error).splitlines()), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # the reader has gone (`| head`): say nothing, and keep the interpreter from flushing into the pipe again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _dispatch(args: list[str]) -> int:
    if args and args[0] in OWN:
        module, _, name = OWN[args[0]].partition(":")
        own: Callable[[list[str]], int] = getattr(import_module(module), name)
        return own(args[1:])
    commands = {point.name: point for point in entry_points(group=GROUP)}
    if not args or args[0] in {"-h", "--help", "help"}:
        print(_overview(commands))
        return 0
    if args[0] in {"-V", "--version"}:
        print(_version())
        return 0
    point = commands.get(args[0])
    if point is None:
        import difflib

        near = difflib.get_close_matches(args[0], commands, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(commands))}"
        print(f"isoexec: no command {args[0]!r}; {hint}", file=sys.stderr)
        return 2
    try:
        command = point.load()
    except ModuleNotFoundError as error:
        missing = error.name or "a module"
        raise IsoExecError(f"`isoexec {point.name}` needs {missing}, which is not installed") from error
    return int(command(args[1:]))


def _overview(commands: dict[str, EntryPoint]) -> str:
    width = max((len(name) for name in commands), default=0)
    rows = [f"  {name:<{width}}  {_summary(point)}".rstrip() for name, point in sorted(commands.items())]
    if not rows:
        rows = ["  none: isoexec is not installed as a package"]
    return "\n".join(["usage: isoexec COMMAND ...", "", *rows])


def _summary(point: EntryPoint) -> str:
    """Return the first line of the command's docstring, or "" where its source cannot be found."""
    from importlib.util import find_spec
    from pathlib import Path

    module, _, attribute = point.value.partition(":")
    top, *rest = module.split(".")
    spec = find_spec(top)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in (Path(folder, *rest).with_suffix(".py"), Path(folder, *rest, "__init__.py")):
            if rest and path.is_file():
                return _docstring(path, attribute)
    return ""


def _docstring(path: Path, function: str) -> str:
    import ast

    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return ""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return ""


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"isoexec {version('isoexec')}"
    except PackageNotFoundError:
        return "isoexec, not installed as a package"


if __name__ == "__main__":
    sys.exit(main())
