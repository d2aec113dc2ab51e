# SPDX-License-Identifier: Apache-2.0
"""The driver of a Ray job of two actors, each a rank; Ray is told to start them again, and their method, if they die."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import ray

HERE = str(Path(__file__).parent)


@ray.remote(max_restarts=-1, max_task_retries=2, num_cpus=1)
class Trainer:
    """One rank."""

    def train(self, folder: str, rank: int, port: str, flags: dict[str, bool]) -> None:
        sys.path.insert(0, HERE)
        from job import rank_main  # type: ignore[import-not-found]  # beside this file

        os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        rank_main(Path(folder), "fail_open", **flags)


def main() -> None:
    port, folder, *flags = sys.argv[1:]
    ray.init(log_to_driver=False)
    kind: Any = Trainer
    actors = [kind.remote() for _ in range(2)]
    work = [
        one.train.remote(folder, rank, port, dict.fromkeys(flags, True)) for rank, one in enumerate(actors)
    ]
    seen = []
    for one in work:
        try:
            ray.get(one)
            seen.append("an end")
        except Exception as error:  # noqa: BLE001 - what a driver sees is what is asked here
            seen.append(type(getattr(error, "cause", None) or error).__name__)
    (Path(folder) / "driver").write_text(", ".join(seen))


if __name__ == "__main__":
    main()
