"""Which published configurations of the Cerebras Model Zoo are accepted, and why the others are refused.

    git clone --branch Release_2.10.0 https://github.com/Cerebras/modelzoo
    python -m benchmarks.model_zoo modelzoo --release 2.10.0

Every YAML file below the folder `models` is read. A file counts as a decoder-only model with features that exist here
unless it is refused for what the network is or has: those refusals are listed in `NOT_HERE`. The result holds names of
files, what was accepted, and reasons; no text of a file.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.environment import describe_environment, write_results
from bexp.explorer.formats.document import FormatError, describe_problem, load_document
from bexp.explorer.formats.request import parse_request

OUT = Path(__file__).parent / "results" / "model-zoo.json"

NOT_HERE = {
    "vision": ("is a vision network", "reads images", "this is a vision network"),
    "not decoder-only": ("is an encoder", "is preference training"),
    "sparse weights": ("sparse weights",),
    "attention that does not exist here": ("sliding-window", "attention sinks", "soft-capp"),
    "positions that do not exist here": ("ALiBi", "'alibi' is not supported"),
    "a norm that attention and FFN share": ("a norm that attention and FFN share",),
}
"""Reasons that say what a network is or has, by kind. Any other refusal is one of a model that should be accepted."""


@dataclass(frozen=True)
class Row:
    """One file: the batch and the length of the request, or what kind of refusal it got, with the reasons."""

    file: str
    accepted: bool
    kind: str | None = None
    reasons: tuple[str, ...] = ()
    batch_size: int | None = None
    seq_length: int | None = None


def read_file(path: Path, name: str) -> Row:
    """Return whether the configuration in `path` is accepted."""
    try:
        request = parse_request(load_document(path.read_text()))
    except FormatError as error:
        reasons = tuple(map(describe_problem, error.errors))
        return Row(name, accepted=False, kind=classify(reasons), reasons=reasons)
    return Row(name, accepted=True, batch_size=request.batch_size, seq_length=request.seq_length)


def classify(reasons: tuple[str, ...]) -> str:
    """Return the kind of a refusal: the first in `NOT_HERE` that one of its reasons belongs to, or `missed`."""
    return next(
        (kind for kind, parts in NOT_HERE.items() if any(part in reason for reason in reasons for part in parts)),
        "missed",
    )


def summarize(rows: list[Row]) -> dict[str, Any]:
    """Return the counts, and the share of the models with features that exist here that is accepted."""
    accepted = sum(row.accepted for row in rows)
    kinds = Counter(row.kind for row in rows if row.kind is not None)
    expected = accepted + kinds["missed"]
    return {
        "files": len(rows),
        "accepted": accepted,
        "refused": dict(sorted(kinds.items())),
        "decoder_only_language_models": len(rows) - kinds["vision"] - kinds["not decoder-only"],
        "models_with_features_that_exist_here": expected,
        "accepted_share_of_them": round(accepted / expected, 3) if expected else None,
    }


def main() -> None:
    """Print the table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a copy of the repository")
    parser.add_argument("--release", default="unknown", help="what the result says the files are from")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    paths = sorted(path for path in arguments.folder.rglob("*.yaml") if "models" in path.parts[:-1])
    if not paths:
        parser.error(f"there is no YAML file below a folder `models` in {arguments.folder}")
    rows = []
    for path in paths:
        parts = path.relative_to(arguments.folder).parts
        rows.append(read_file(path, "/".join(parts[parts.index("models") + 1 :] if "models" in parts else parts)))
        row = rows[-1]
        print(f"{'accepted' if row.accepted else 'refused '}  {row.file}")
        for reason in row.reasons:
            print(f"          {reason}")
    summary = summarize(rows)
    print("\n".join(f"{name}: {value}" for name, value in summary.items()))
    results = {
        "release": arguments.release,
        "environment": describe_environment(),
        "summary": summary,
        "files": [{key: value for key, value in asdict(row).items() if value not in (None, ())} for row in rows],
    }
    write_results(arguments.out, results)


if __name__ == "__main__":
    main()
