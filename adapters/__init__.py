# SPDX-License-Identifier: Apache-2.0
"""One folder a runtime: the only place that knows an engine."""
