"""Rewrites the marked sections of README.md.

python -m benchmarks.readme            # rewrites them
python -m benchmarks.readme --check    # fails if README.md says something else
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.readme.results import ROOT
from benchmarks.readme.sections import fill


def main(arguments: list[str] | None = None) -> int:
    """Rewrite or check README.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    readme = ROOT / "README.md"
    old = readme.read_text()
    new = fill(old)
    if options.check:
        if new != old:
            print("README.md does not say what benchmarks/results/ holds: run python -m benchmarks.readme")
        return int(new != old)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
