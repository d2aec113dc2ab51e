# SPDX-License-Identifier: Apache-2.0
"""The rollout engine vLLM under an execution contract; importing this package imports no engine."""
