# SPDX-License-Identifier: Apache-2.0
"""What a run really does: logprobs, installed kernels, topology, environment, weights, time."""
