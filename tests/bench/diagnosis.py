# SPDX-License-Identifier: Apache-2.0
"""How often the first cause named is the planted one, and how often a clean window is blamed.

`python tests/bench/diagnosis.py [--tokens 1000 10000 100000] [--seeds 3] [--clean 1000]` prints Markdown: accuracy by stream
length, the confusion matrix at the longest, false alarms by regime, milliseconds a window. Exit status 1 where fewer than
95 % are right at 100k tokens or a clean window is blamed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "daemon" / "streams"))
from streams import KINDS, Stream, clean, stream  # type: ignore[import-not-found]

from isoexec.contracts.window import REGIMES
from isoexec.daemon.diagnosis.classify import Finding, diagnose


def named(found: tuple[Finding, ...]) -> str:
    return found[0].id if found else "none"


def judged(one: Stream) -> tuple[str, float]:
    start = time.thread_time()
    found = diagnose(one.pairs, one.regime, settings=one.settings, history=one.history)
    return named(found), time.thread_time() - start


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--clean", type=int, default=1000)
    parser.add_argument("--clean-tokens", type=int, nargs="+", default=[2000, 20_000])
    chosen = parser.parse_args()
    failed = False
    print(
        "| tokens | streams | first cause right | unclear | none | ms a window |\n|---|---|---|---|---|---|"
    )
    rows: dict[str, Counter[str]] = {}
    for tokens in chosen.tokens:
        rows, spent = {}, 0.0
        for kind, (_, strengths, _) in KINDS.items():
            for strength in strengths:
                for seed in range(chosen.seeds):
                    said, seconds = judged(stream(kind, 1000 * seed + 7, tokens, strength))
                    rows.setdefault(kind, Counter())[said] += 1
                    spent += seconds
        total = sum(sum(row.values()) for row in rows.values())
        right = sum(rows[kind][KINDS[kind][0]] for kind in rows)
        unclear, none = (sum(row[name] for row in rows.values()) for name in ("unclear", "none"))
        share, spent = 100 * right / total, 1e3 * spent / total
        print(f"| {tokens:,} | {total} | {share:.1f} % | {unclear} | {none} | {spent:.1f} |", flush=True)
        failed |= tokens >= 100_000 and right < 0.95 * total
    print(
        f"\n## Confusion at {chosen.tokens[-1]:,} tokens\n\n| planted | wanted | named (streams) |\n|---|---|---|"
    )
    for kind, row in rows.items():
        wanted = KINDS[kind][0]
        said = ", ".join(
            f"**{name}** {n}" if name == wanted else f"{name} {n}" for name, n in row.most_common()
        )
        print(f"| {kind} | {wanted} | {said} |")
    print("\n## Clean windows\n\n| regime | windows | tokens a window | blamed |\n|---|---|---|---|")
    for regime in REGIMES:
        blamed: Counter[str] = Counter()
        for index in range(chosen.clean):
            said, _ = judged(
                clean(regime, 10_000 + index, chosen.clean_tokens[index % len(chosen.clean_tokens)])
            )
            blamed[said] += 1
        del blamed["none"]
        failed |= bool(blamed)
        sizes = " or ".join(f"{n:,}" for n in chosen.clean_tokens)
        print(f"| {regime} | {chosen.clean} | {sizes} | {dict(blamed) or 0} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
