# SPDX-License-Identifier: Apache-2.0
"""moe.shared_gate/1: a shared expert's output times the sigmoid of its token's logit; on sm90 only."""
