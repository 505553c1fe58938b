"""Reads files with Axolotl's schema; none of their keys may be unknown to it."""

import sys
from pathlib import Path

import yaml
from axolotl.utils.schemas.config import AxolotlInputConfig

for path in sorted(Path(sys.argv[1]).iterdir()):
    values = yaml.safe_load(path.read_text())
    assert set(values) <= set(AxolotlInputConfig.model_fields), path.name
    found = AxolotlInputConfig(
        base_model="model", datasets=[{"path": "data", "type": "alpaca"}], learning_rate=1e-4, **values
    )
    assert found.micro_batch_size == values["micro_batch_size"]
    assert found.bf16 is True
