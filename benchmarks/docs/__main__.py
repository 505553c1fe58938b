"""Rewrites the generated sections of README.md and docs/.

python -m benchmarks.docs            # rewrites them
python -m benchmarks.docs --check    # fails if a page is not current
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.docs.results import ROOT
from benchmarks.docs.sections import fill, pages


def main(arguments: list[str] | None = None) -> int:
    """Rewrite or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    stale = []
    for page in pages():
        old = page.read_text()
        new = fill(old)
        if new != old:
            stale.append(str(page.relative_to(ROOT)))
            if not options.check:
                page.write_text(new)
    if options.check and stale:
        print(f"not current with benchmarks/results/ and the schema: {', '.join(stale)}. Run python -m benchmarks.docs")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
