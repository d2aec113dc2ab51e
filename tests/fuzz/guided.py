# SPDX-License-Identifier: Apache-2.0
"""Fuzz `FrameReader` guided by the coverage of `contracts` and msgpack's pure Python decoder, with Atheris (libFuzzer).

    pip install atheris && python tests/fuzz/guided.py [libFuzzer options, -max_total_time=600 or -runs=1000000]

Starts from the good messages and the corpus of `ingest.py`. Input is a stream, read in pieces whose size its first byte says:
it ends in messages or in a WireError, nothing else, and gives the same messages in one piece. What breaks this is written to
`corpus/`, from where the suite's fuzzer takes it too.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ["MSGPACK_PUREPYTHON"] = "1"  # what cannot be instrumented guides nothing

import atheris

with atheris.instrument_imports(include=["isoexec.contracts", "msgpack"]):
    from ingest import CORPUS, seeds  # type: ignore[import-not-found]

    from isoexec.contracts.errors import WireError
    from isoexec.contracts.wire import FrameReader


def told(data: bytes, piece: int) -> tuple[list[str], bool]:
    """The headers of a stream's messages, and whether it was refused."""
    reader, found = FrameReader(), list[str]()
    try:
        for at in range(0, len(data), piece):
            found += [repr(message.header()) for message in reader.feed_each(data[at : at + piece])]
    except WireError:
        return found, True
    return found, False


def one_input(data: bytes) -> None:
    if data and told(data[1:], 1 + data[0]) != told(data[1:], len(data)):
        raise AssertionError("other messages in pieces than in one")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="isoexec-fuzz-") as folder:
        for number, data in enumerate(seeds()["frames"]):
            (Path(folder) / str(number)).write_bytes(b"\xff" + data)
        CORPUS.mkdir(exist_ok=True)
        atheris.Setup([sys.argv[0], f"-artifact_prefix={CORPUS}/frames-", *sys.argv[1:], folder], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
