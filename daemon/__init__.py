# SPDX-License-Identifier: Apache-2.0
"""The process beside the job: ingest, pair, judge, store, export, halt. Imports no torch."""
