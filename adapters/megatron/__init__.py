# SPDX-License-Identifier: Apache-2.0
"""The megatron-core adapter: contract kernels under the trainer, by spec swap and instance attribute, no symbol patched."""
