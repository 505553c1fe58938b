"""Draws docs/images/page.png: the page's view of an exploration that is replayed on a recorded table.

It needs Chromium. What is drawn is the report of that exploration, which has the same view.

python -m benchmarks.page_picture
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.environment import ROOT
from benchmarks.picture import TABLE
from tests.browser.chromium import Chromium, find_chromium

REQUEST = ROOT / "benchmarks" / "tables" / "olmoe-zipf.yaml"
PICTURE = ROOT / "docs" / "images" / "page.png"
WIDTH, HEIGHT = 1280, 1075


def main() -> int:
    executable = find_chromium()
    if executable is None:
        sys.exit("no Chromium is installed here")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = os.environ | {"BEXP_DATABASE_URL": f"sqlite:///{folder / 'bexp.db'}"}
        for command in (
            ["explore", str(REQUEST), "--device", f"replay:{TABLE}"],
            ["report", "latest", "--out", str(folder / "report.html")],
        ):
            subprocess.run([sys.executable, "-m", "bexp.api.cli", *command], env=environment, check=True)
        with Chromium(executable, folder / "profile") as browser:
            browser.open((folder / "report.html").as_uri(), width=WIDTH, height=HEIGHT)
            browser.wait_for("document.querySelectorAll('svg.plot').length === 5 && document.querySelector('.heatmap')")
            browser.screenshot(PICTURE, whole=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
