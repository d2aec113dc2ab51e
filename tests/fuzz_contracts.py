# SPDX-License-Identifier: Apache-2.0
"""Fuzz the contract: mutated files are either refused by a ContractError or are contracts through and through.

`python tests/fuzz_contracts.py [--seconds N] [--seed N]`; not run by the suite. Half of the inputs are mutations of the values of
a contract, written in any layout; the others are mutations of a file's bytes. Of each it is checked that

- loading ends in a contract or a ContractError with a fix, within a limit of processor time;
- a contract survives its canonical dict, its canonical JSON as a file, and its values in another order: same digests;
- its values and its canonical dict are valid by the JSON Schema (which admits more: it cannot say what fields mean together);
- it is equal to itself by `diff`, and differs from the contract it came of exactly when a digest does, in the identity that does;
- lint and render end, with findings only.

Prints counts; the first failure is kept as a file and ends the run with exit code 1.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import jsonschema
import yaml

from isoexec.contracts.canonical import encode
from isoexec.contracts.diff import diff, render
from isoexec.contracts.errors import ContractError
from isoexec.contracts.identities import IDENTITIES
from isoexec.contracts.lint import lint
from isoexec.contracts.loading import parse
from isoexec.contracts.schema import Contract, json_schema, library
from isoexec.contracts.specification import SPEC, examples

VECTORS = Path(__file__).parent / "contracts" / "vectors"
SECONDS_EACH = 10.0  # of processor time: the machine may be busy with other work
DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
BASES = [VECTORS / "contract.yaml", VECTORS / "full.yaml", *sorted(library().glob("*.yaml"))]
WORDS = [
    "", "a", "engine", "trainer", "kernel", "library", "evidence", "none", "canonical", "protected", "linear.chain/2", "é",
    "e\u0301", "x" * 201, "sha256:" + "0" * 64, "sha256:" + "g" * 64, "1e-3", "0.0010", "-1", "1e999", "1" * 40 + "e999",
    "00", "true", "null", "\x00", "\n", " ", "😀", "\ud800", "engine_decode", "trainer_score", "TP", "a\n", "9" * 80, "\u2028",
]  # fmt: skip
SCALARS: list[object] = [
    None, True, False, 0, 1, -1, 2, 64, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 0.5, float("nan"), float("inf"), [], {},
    [[]], [{}], {"fixed": 1}, {"": 1}, {"kind": "none"}, {"pinned": 1}, {"a": {"b": {"c": []}}},
]  # fmt: skip
PIECES = [
    b"\n", b" ", b"\t", b"- ", b": ", b":", b"#", b"[", b"]", b"{", b"}", b",", b"'", b'"', b"&a ", b"*a", b"!!str ", b"<<: ",
    b"|\n", b">\n", b"---\n", b"...\n", b"? ", b"\\", b"\x00", b"\xff", b"\xc3", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"0.1",
    b"~", b"null", b"yes", b"0x1", b"%YAML 1.1\n", b"\r\n", b"\xc2\x85", b"- - ", b"{a: ", b"[" * 70, b"@", b"`",
]  # fmt: skip


class HangError(Exception):
    """An input took more processor time than it may."""


def addresses(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in list(pairs):
        yield (*path, key)
        yield from addresses(entry, (*path, key))


def mutate(value: Any, rng: random.Random) -> Any:
    """Change a few places of a contract's values: replace, drop, double, swap, move, rename."""
    for _ in range(rng.choice([1, 1, 1, 2, 3, 6])):
        places = list(addresses(value))
        if not places:
            return value
        *path, last = rng.choice(places)
        holder = value
        for key in path:
            holder = holder[key]
        other = rng.choice(places)
        taken = value
        for key in other:
            taken = taken[key]
        action = rng.randrange(7)
        if action == 0:
            # a copy: the lists and maps among them may be changed by the next turn
            holder[last] = rng.choice(WORDS) if rng.random() < 0.6 else copy.deepcopy(rng.choice(SCALARS))
        elif action == 1:
            del holder[last]
        elif action == 2:
            holder[last] = json.loads(json.dumps(taken))
        elif action == 3 and isinstance(holder, list):
            holder.insert(rng.randrange(len(holder) + 1), json.loads(json.dumps(taken)))
        elif action == 4 and isinstance(holder, dict):
            holder[rng.choice([*WORDS, *(str(one[-1]) for one in places)])] = holder.pop(last)
        elif action == 5 and isinstance(holder[last], str) and holder[last]:
            text = holder[last]
            at = rng.randrange(len(text))
            holder[last] = text[:at] + rng.choice([*WORDS, text[at].upper(), "0"]) + text[at + 1 :]
        elif isinstance(holder[last], int):
            holder[last] = holder[last] + rng.choice([-1, 1, 2, 63, 2**62])
    return value


def written(value: Any, rng: random.Random) -> bytes:
    """Values as a file: JSON, or YAML of some layout; a value that YAML cannot write is JSON."""
    if rng.random() < 0.5:
        return json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1])).encode(
            "utf-8", "surrogatepass"
        )
    style = rng.choice([None, True, False])
    try:
        text: str = yaml.dump(
            value, Dumper=DUMPER, default_flow_style=style, allow_unicode=True, width=rng.choice([20, 90, 10**6]),
            sort_keys=False,
        )  # fmt: skip
        return text.encode("utf-8", "surrogatepass")
    except (yaml.YAMLError, UnicodeError):
        return json.dumps(value).encode()


def mangle(data: bytes, rng: random.Random) -> bytes:
    """Change bytes: insert, cut, repeat, move, flip."""
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(data) + 1)
        upto = min(len(data), at + rng.choice([1, 2, 8, 40, 400]))
        action = rng.randrange(6)
        if action == 0:
            data = data[:at] + rng.choice(PIECES) + data[at:]
        elif action == 1:
            data = data[:at] + data[upto:]
        elif action == 2:
            data = data[:upto] + data[at:upto] * rng.choice([1, 1, 3]) + data[upto:]
        elif action == 3 and data:
            at = min(at, len(data) - 1)
            data = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        elif action == 4:
            to = rng.randrange(len(data) + 1)
            data = data[:to] + data[at:upto] + data[to:]
        else:
            lines = data.split(b"\n")
            first, second = rng.randrange(len(lines)), rng.randrange(len(lines))
            lines[first], lines[second] = lines[second], lines[first]
            data = b"\n".join(lines)
    return data


def shuffled(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict):
        items = [(key, shuffled(entry, rng)) for key, entry in value.items()]
        return dict(rng.sample(items, len(items)))
    return [shuffled(one, rng) for one in rng.sample(value, len(value))] if isinstance(value, list) else value


class Fuzzer:
    """Checks inputs; counts what became of them."""

    def __init__(self) -> None:
        self.validator = jsonschema.Draft202012Validator(json_schema())
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        texts = [path.read_bytes() for path in BASES]
        self.bases = [(text, Contract.from_document(parse(text))) for text in texts]
        small = next(body for cls, body in examples((SPEC / "contract-v1.md").read_text()) if cls is Contract)
        self.small = (small.encode(), Contract.from_document(parse(small)))
        self.slowest = 0.0

    def one(self, rng: random.Random) -> bytes:
        """Make one input."""
        # a small contract is fuzzed ten times as fast as a shipped one
        text, base = self.small if rng.random() < 0.6 else rng.choice(self.bases)
        self.base = base
        if rng.random() < 0.5:
            source = base.to_dict() if rng.random() < 0.5 else parse(text).value
            return written(mutate(json.loads(json.dumps(source)), rng), rng)
        return mangle(text if rng.random() < 0.8 else encode(base.to_dict()), rng)

    def check(self, data: bytes, rng: random.Random) -> None:
        """Check one input; raises AssertionError, or whatever broke."""
        try:
            document = parse(data, path="fuzz.yaml")
            contract = Contract.from_document(document)
        except ContractError as error:
            if not (error.path == "fuzz.yaml" and error.problem and error.fix and str(error)):
                raise AssertionError(f"a refusal without its facts: {error!r}") from error
            self.counts["refused"] += 1
            self.refusals[" ".join(word for word in error.problem.split() if word.isalpha())[:40]] += 1
            return
        self.counts["accepted"] += 1
        plain, digests = contract.to_dict(), contract.identities.to_dict()
        self.validator.validate(document.value)
        self.validator.validate(plain)
        for again in (
            Contract.from_dict(plain),
            Contract.from_document(parse(encode(plain))),
            Contract.from_dict(shuffled(document.value, rng)),
        ):
            if again.identities.to_dict() != digests or again.to_dict() != plain:
                raise AssertionError("another digest after a round trip")
        if diff(contract, contract):
            raise AssertionError("a contract differs from itself")
        base = self.base.identities.to_dict()
        found = diff(self.base, contract)
        if {one.identity for one in found} != {name for name in IDENTITIES if base[name] != digests[name]}:
            raise AssertionError("the diff and the digests do not agree")
        self.counts["unchanged" if not found else "changed"] += 1
        if len(render(found).splitlines()) < len(found):
            raise AssertionError("a difference that is not shown")
        for finding in lint(contract):
            if not (finding.rule and finding.message and finding.fix):
                raise AssertionError(f"a finding without its facts: {finding}")
        self.counts["linted"] += 1

    def run(self, seconds: float, seed: int, keep: Path) -> int:
        """Fuzz for a while; 1 when an input broke something."""
        end = time.monotonic() + seconds
        number = 0
        while time.monotonic() < end:
            rng = random.Random(f"{seed}:{number}")  # noqa: S311  an input is told by its number
            number += 1
            data = self.one(rng)
            start = time.thread_time()
            signal.setitimer(signal.ITIMER_PROF, SECONDS_EACH)
            try:
                self.check(data, rng)
            except (Exception, HangError) as error:  # noqa: BLE001  whatever it is, it is the finding
                signal.setitimer(signal.ITIMER_PROF, 0)
                path = keep / f"fuzz-{seed}-{number - 1}.yaml"
                path.write_bytes(data)
                print(
                    f"input {number - 1} of seed {seed}: {type(error).__name__}: {str(error)[:300]}\nkept as {path}"
                )
                faulthandler.dump_traceback()
                return 1
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            self.slowest = max(self.slowest, time.thread_time() - start)
            if number % 5000 == 0:
                self.report(number, seconds - (end - time.monotonic()))
        self.report(number, seconds)
        return 0

    def report(self, number: int, seconds: float) -> None:
        print(
            f"{number} inputs in {seconds:.0f} s: {dict(self.counts)}, {len(self.refusals)} kinds of refusal, "
            f"slowest {self.slowest:.2f} s of processor time",
            flush=True,
        )


def _alarm(number: int, frame: FrameType | None) -> None:
    raise HangError(f"over {SECONDS_EACH} s of processor time")


def main() -> int:
    """Run, and print what the refusals were."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--keep", type=Path, default=Path(tempfile.gettempdir()), help="where a failing input goes"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGPROF, _alarm)
    fuzzer = Fuzzer()
    code = fuzzer.run(args.seconds, args.seed, args.keep)
    for words, count in fuzzer.refusals.most_common(25):
        print(f"  {count:7}  {words}")
    return code


if __name__ == "__main__":
    sys.exit(main())
