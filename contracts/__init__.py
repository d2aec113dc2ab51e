# SPDX-License-Identifier: Apache-2.0
"""What a run promises, and whether it kept it. Imports no torch."""
