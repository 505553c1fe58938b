"""Reads flags with torchtitan's ConfigManager, over a configuration of its own."""

import subprocess
import sys
from pathlib import Path

from torchtitan.config import ConfigManager

for path in sorted(Path(sys.argv[1]).iterdir()):
    script = f'source {path}\nprintf "%s\\n" "${{TORCHTITAN_FLAGS[@]}}"'
    flags = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    found = ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_debugmodel", *flags])
    expected = {".no_batch": -1, ".replaced": 96}.get(path.suffix, 512)
    assert found.training.global_batch_size == expected, (path.name, found.training.global_batch_size)
    assert f"--training.seq_len={found.training.seq_len}" in "=".join(flags), path.name
    policy = type(found.activation_checkpoint).__qualname__
    full = path.suffix in {".recomputed", ".partial", ".selective", ".zero3"}
    assert policy == ("FullAC.Config" if full else "NoneType"), (path.name, policy)
    assert found.compile.enable is (path.suffix == ".compiled")
