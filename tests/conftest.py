# SPDX-License-Identifier: Apache-2.0
"""Keep the repo root off sys.path: kernels, daemon, adapters and contracts are other people's module names."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != _ROOT]
