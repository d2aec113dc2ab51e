# SPDX-License-Identifier: Apache-2.0
"""Grafana and Prometheus as code."""
