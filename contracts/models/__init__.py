# SPDX-License-Identifier: Apache-2.0
"""Models and the contracts shipped for them: `config` reads facts, `families` and `regions` describe, `resolve` matches."""

from isoexec.contracts.models.config import FIELDS, ModelConfig, config_of, facts_of, read_config, text_facts

__all__ = ["FIELDS", "ModelConfig", "config_of", "facts_of", "read_config", "text_facts"]
