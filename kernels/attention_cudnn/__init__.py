# SPDX-License-Identifier: Apache-2.0
"""attention.mma_segments_cudnn/1 for sm90; `ops` needs triton, and cuDNN's frontend for gradients."""
