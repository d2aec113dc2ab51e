# SPDX-License-Identifier: Apache-2.0
"""The console command `isoexec gate ...`: prove kernels, look at what proves them, and check that it still does."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from isoexec.contracts.errors import EvidenceError, IsoExecError
from isoexec.contracts.evidence import FAMILIES, EvidenceRecord, Store, default_store, moment
from isoexec.kernels.registry import ARCHS

if TYPE_CHECKING:
    from rich.console import Console

    from isoexec.kernels.gates.running import Job
    from isoexec.kernels.gates.verifying import Held

__all__ = ["run"]

_EXIT = """
exit codes:
  0    list, show: printed; run: every gate that ran holds; verify: everything is as it must be
  1    run: an element differs, a control passed or a check broke (no evidence is written for that gate);
       verify: a record or a contract is not as it must be; any: something is missing or unusable
  2    wrong usage
  130  interrupted; `gate run` goes on from there when it is run again
"""


def run(argv: Sequence[str]) -> int:
    """Prove kernels by gates, and check the evidence."""
    parser = _parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed why
        return stop.code if isinstance(stop.code, int) else 2
    act: Callable[[argparse.Namespace], int] = args.act
    return act(args)


def _parser() -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="isoexec gate", description=run.__doc__, epilog=_EXIT, formatter_class=shape
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, words: str, act: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=words, description=words, epilog=_EXIT, formatter_class=shape)
        sub.set_defaults(act=act)
        return sub

    sub = command("list", "print the gates there are, and which have evidence here", _list)
    _arch(sub, default=None)
    _store(sub)
    _format(sub)

    sub = command("run", "run gates and write the records of those that hold", _run)
    _arch(sub, default="cpu")
    sub.add_argument(
        "--function", action="append", default=[], metavar="NAME", help="only this one; may be repeated"
    )
    sub.add_argument(
        "--family",
        action="append",
        default=[],
        choices=list(FAMILIES),
        help="only this one, may be repeated: its results are kept for the next run, and no record is written",
    )
    sub.add_argument("--quick", action="store_true", help="smaller shapes; a record says that it is quick")
    sub.add_argument("--fresh", action="store_true", help="do not go on from an interrupted run")
    sub.add_argument("--missing", action="store_true", help="only gates without a record of this source here")
    sub.add_argument(
        "--extend",
        action="store_true",
        help="go on from the newest record of this source here: run only checks, and degrees of parallelism, that it lacks",
    )
    sub.add_argument(
        "--contract",
        action="append",
        default=[],
        metavar="CONTRACT",
        help="prove the constants of this contract too: a file or a shipped name; may be repeated",
    )
    sub.add_argument(
        "--pin",
        nargs="+",
        default=[],
        metavar="FILE",
        help="write sources and records into these contract files, and prove their constants too",
    )
    sub.add_argument(
        "--valid-days", type=_days, default=365, metavar="N", help="days until a record expires (365)"
    )
    sub.add_argument("--sign", type=Path, metavar="KEYFILE", help="sign the records with this Ed25519 key")
    sub.add_argument(
        "--work", type=Path, metavar="DIR", help="where an interrupted run is kept (the state directory)"
    )
    _store(sub)

    sub = command("show", "print the records of a store, or one of them, or those of a function", _show)
    sub.add_argument(
        "which", nargs="?", metavar="DIGEST|FUNCTION", help="a digest, the start of one, or a function"
    )
    _store(sub)
    _format(sub)

    sub = command("verify", "check every record of a store, and the contracts that name them", _verify)
    sub.add_argument(
        "contracts",
        nargs="*",
        metavar="CONTRACT",
        help="files or shipped names (every shipped contract of --arch)",
    )
    _arch(sub, default="cpu")
    sub.add_argument("--rerun", type=int, default=0, metavar="N", help="run N of the recorded checks again")
    sub.add_argument("--seed", type=int, help="which N; printed, so that it can be repeated")
    sub.add_argument("--at", metavar="TIME", help="as if it were this time, such as 2026-12-31T00:00:00Z")
    _store(sub)

    sub = command("key", "make an Ed25519 key for --sign, and print its public half for a contract", _key)
    sub.add_argument("file", type=Path, help="the new private key")

    sub = command("sign", "sign records with an Ed25519 key", _sign)
    sub.add_argument("key", type=Path, metavar="KEYFILE")
    sub.add_argument("digests", nargs="+", metavar="DIGEST")
    _store(sub)
    return parser


def _arch(sub: argparse.ArgumentParser, default: str | None) -> None:
    sub.add_argument("--arch", choices=ARCHS, default=default, help=f"{default or 'every one'} unless told")


def _store(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--store",
        type=Path,
        metavar="DIR",
        help="look in and write to this folder alone (ISOEXEC_EVIDENCE, else the state directory, then the shipped one)",
    )


def _format(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--format", choices=("text", "json"), default="text")


def _days(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 36500:
        raise argparse.ArgumentTypeError(f"wanted days from 1 to 36500, found {text}")
    return int(text)


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 220)  # a table in a file is not cut to a terminal


def _open(args: argparse.Namespace) -> Store:
    return Store([args.store]) if args.store else default_store()


def _list(args: argparse.Namespace) -> int:
    from isoexec.kernels.gates.checking import subject
    from isoexec.kernels.gates.found import constants_of, contracts_for, gate_for, gated
    from isoexec.kernels.gates.showing import gates_table

    store, rows, plain = _open(args), [], []
    for arch in [args.arch] if args.arch else ARCHS:
        contracts = contracts_for(arch)
        for function, there in gated(arch).items():
            ours = subject(function, arch)
            sets = constants_of(function, contracts)
            try:
                families = gate_for(function, arch).families if there else ()
                why = "" if there else "no gate"
            except ImportError as error:
                families, why = (), f"needs {error.name}"
            found = store.find(function=function, provider=ours.name, arch=arch)
            fresh = [one for one in found if one.provider == ours]
            evidence = fresh[0].digest if fresh else ""
            rows.append(
                (
                    function,
                    ours.name,
                    families,
                    len(sets),
                    evidence[:19] or why or ("of another source" if found else "none"),
                )
            )
            plain.append(
                {
                    "function": function,
                    "arch": arch,
                    "provider": ours.name,
                    "source": ours.source,
                    "families": list(families),
                    "constants": sets,
                    "evidence": evidence or None,
                }
            )
    if args.format == "json":
        print(json.dumps(plain, indent=2))
    else:
        _console().print(gates_table(rows))
    return 0


def _run(args: argparse.Namespace) -> int:
    from isoexec.contracts.signing import load_key, sign
    from isoexec.kernels.gates.found import contracts_for, device_for, gated
    from isoexec.kernels.gates.running import jobs_of, pin_contract, single_thread
    from isoexec.kernels.gates.showing import counts

    device_for(args.arch)  # before anything else: gates of an arch run on it, or nowhere
    key = load_key(args.sign) if args.sign else None
    store = _open(args)
    contracts = contracts_for(args.arch, [*args.contract, *args.pin])
    functions = args.function or [name for name, there in gated(args.arch).items() if there]
    with single_thread():
        jobs = jobs_of(functions, args.arch, contracts, families=args.family, full=not args.quick)
        idle = sorted(set(functions) - {job.gate.function for job in jobs})
        if idle:
            print(f"not run, since no contract of {args.arch} binds them: {', '.join(idle)}")
        held = _held(jobs, store) if (args.missing or args.extend) and not args.family else {}
        jobs = [job for job in jobs if job.gate.function not in held]
        made, failed = _prove(args, jobs, store)
    records = [*held.values(), *made]
    if key is not None:
        for record in records:
            sign(store, record.digest, key)
    for path in args.pin:
        changed = pin_contract(Path(path), records)
        print(f"{path}: digests of {len(changed)} functions changed")
    total = sum(record.elements for record in records)
    print(f"{len(records)} gates hold, {failed} fail; {counts(total)} elements compared as integers")
    return 1 if failed else 0


def _held(jobs: Sequence[Job], store: Store) -> dict[str, EvidenceRecord]:
    """The records that say already what these jobs would, by function."""
    from isoexec.kernels.gates.running import proven

    out = {}
    for function in sorted({job.gate.function for job in jobs}):
        own = [job for job in jobs if job.gate.function == function]
        record = proven(own, store, now=time.time())
        if record is not None:
            print(f"{function}: proven by {record.digest}")
            out[function] = record
    return out


def _prove(args: argparse.Namespace, jobs: Sequence[Job], store: Store) -> tuple[list[EvidenceRecord], int]:
    """Run the jobs, write a record of each gate that holds as a whole, and count those that do not."""
    from isoexec.kernels.gates.found import environment
    from isoexec.kernels.gates.progress import Progress
    from isoexec.kernels.gates.running import State, carry_over, record_of, run_gates
    from isoexec.kernels.gates.showing import counts, outcome_lines

    state, found = State(args.work), environment(args.arch)
    for function in sorted({job.gate.function for job in jobs}) if args.extend else ():
        own = [job for job in jobs if job.gate.function == function]
        taken = carry_over(own, store, state, now=time.time())
        print(f"{function}: {taken} of {len(own)} checks taken over from the newest record")
    records: list[EvidenceRecord] = []
    failed = 0
    with Progress(len(jobs)) as progress:
        for outcome in run_gates(jobs, state, fresh=args.fresh, said=progress.said):
            verdict = "fails, no evidence is written" if outcome.failures else "holds"
            kept = f", {outcome.kept} checks kept from an earlier run" if outcome.kept else ""
            progress.line(
                f"{outcome.gate.function}: {verdict}; {len(outcome.checks)} checks, "
                f"{counts(outcome.elements)} elements, {outcome.seconds:.1f} s{kept}"
            )
            for line in outcome_lines(outcome):
                progress.line(line)
            failed += bool(outcome.failures)
            if outcome.failures or args.family:
                continue
            record = record_of(outcome, full=not args.quick, valid_days=args.valid_days)
            progress.line(f"  {store.write(record)}")
            records.append(record)
            state.drop(job.key(found) for job in jobs if job.gate is outcome.gate)
    return records, failed


def _show(args: argparse.Namespace) -> int:
    from isoexec.contracts.signing import signers
    from isoexec.kernels.gates.showing import record_text, records_table

    store = _open(args)
    if not args.which:
        rows: list[tuple[str, EvidenceRecord | None, str]] = []
        for digest in store.digests():
            try:
                rows.append((digest, store.read(digest), ""))
            except EvidenceError as error:
                rows.append((digest, None, str(error)))
        rows.sort(key=lambda row: (row[1].function, row[1].made) if row[1] else ("", ""))
        if args.format == "json":
            print(
                json.dumps(
                    [
                        {"digest": d, "record": r.to_dict() if r else None, "error": w or None}
                        for d, r, w in rows
                    ],
                    indent=2,
                )
            )
        else:
            _console().print(records_table(rows))
        return 0
    found = _records(store, args.which)
    if args.format == "json":
        print(json.dumps([one.to_dict() for one in found], indent=2))
    else:
        print("\n\n".join(record_text(one, signers(store, one.digest)) for one in found))
    return 0


def _records(store: Store, which: str) -> list[EvidenceRecord]:
    """The records of a digest, of the start of one, or of a function, newest first; raises where there are none."""
    start = "sha256:" + which.removeprefix("sha256:")
    found = [store.read(digest) for digest in store.digests() if digest.startswith(start)]
    if not found:
        readable = []
        for digest in store.digests():
            try:
                readable.append(store.read(digest))
            except EvidenceError:
                continue  # `verify` names it
        found = [one for one in readable if one.function == which]
    if not found:
        raise EvidenceError(
            field="evidence",
            wanted=f"a record of {which}",
            found=f"none in {', '.join(map(str, store.paths))}",
            fix="`isoexec gate show` lists what is there",
        )
    return sorted(found, key=lambda one: moment(one.made), reverse=True)


def _verify(args: argparse.Namespace) -> int:
    from isoexec.contracts.schema import Contract, library
    from isoexec.kernels.gates.found import contracts_for
    from isoexec.kernels.gates.running import single_thread
    from isoexec.kernels.gates.showing import counts
    from isoexec.kernels.gates.verifying import judge, names, refused, unproven

    now = _moment(args.at) if args.at else time.time()
    store = _open(args)
    paths = [Path(one) if Path(one).exists() else library(one) for one in args.contracts]
    contracts = [Contract.load(path) for path in paths] or contracts_for(args.arch)
    named: dict[str, list[str]] = {}
    for contract in contracts:
        for digest, where in names(contract).items():
            named.setdefault(digest, []).extend(f"{contract.name} {one}" for one in where)
    with single_thread():
        held = [judge(store, digest, now=now) for digest in store.digests()]
        bad = 0
        for one in held:
            used = one.digest in named
            what = f"{one.record.function} on {one.record.arch}" if one.record else "unreadable"
            # what nobody names harms nobody, unless it is not what its name says
            fails = bool(one.findings) and (used or one.record is None)
            bad += fails
            state = "FAILS" if fails else "as it must be" if not one.findings else "of another time or place"
            signed = f", signed by {len(one.signers)}" if one.signers else ""
            count = f", {counts(one.record.elements)} elements" if one.record else ""
            print(
                f"{one.digest[:19]}  {what}{count}{signed}: {state}, named by {len(named.get(one.digest, []))} places"
            )
            for finding in one.findings:
                print(f"  {finding.field}: wanted {finding.wanted}, found {finding.found}; {finding.fix}")
            for note in one.notes:
                print(f"  {note}")
        for contract in contracts:
            found = refused(contract, store, now=now)
            bad += len(found)
            idle = unproven(contract)
            said = f"; unproven, as it says: {', '.join(idle)}" if idle else ""
            print(f"{contract.name}: {'discharged' if not found else f'{len(found)} refusals'}{said}")
            for finding in found:
                print(f"  {finding}")
        if args.rerun:
            bad += _rerun(args, held)
    print(
        f"{len(held)} records, {len(contracts)} contracts: {'all as they must be' if not bad else f'{bad} are not'}"
    )
    return 1 if bad else 0


def _rerun(args: argparse.Namespace, held: Sequence[Held]) -> int:
    from isoexec.kernels.gates.verifying import rerun, sample

    seed = args.seed if args.seed is not None else time.time_ns() % 2**31
    chosen = sample(held, args.rerun, seed)
    print(f"running {len(chosen)} of the recorded checks again (--seed {seed})")
    if not chosen:
        print("  FAILS: no record of this source, gate and environment is here")
        return 1
    bad = 0
    for one, check in chosen:
        found = rerun(one, check)
        bad += len(found)
        what = f"{one.record.function if one.record else one.digest} {check.family}"
        print(f"  {what}: {'the same counts' if not found else 'FAILS'}")
        for finding in found:
            print(f"    {finding.field}: wanted {finding.wanted}, found {finding.found}; {finding.fix}")
    return bad


def _moment(text: str) -> float:
    try:
        return moment(text)
    except ValueError as error:
        raise IsoExecError(f"--at {text}: wanted a time such as 2026-12-31T00:00:00Z") from error


def _key(args: argparse.Namespace) -> int:
    from isoexec.contracts.signing import make_key

    public = make_key(args.file)
    print(f"{args.file}: keep it secret. For a contract's claims.evidence.signers:\n{public}")
    return 0


def _sign(args: argparse.Namespace) -> int:
    from isoexec.contracts.signing import load_key, sign

    store, key = _open(args), load_key(args.key)
    for which in args.digests:
        for record in _records(store, which):
            print(f"{record.digest} signed by {sign(store, record.digest, key)}")
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
