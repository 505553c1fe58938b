"""Searches for the request that takes longest to read: `python -m tests.chaos.requests --examples 20000`.

A request is put together from a valid one and a filler at one of its fields. Hypothesis varies both and climbs towards
the slowest. What it finds is printed, and the status is 1 if one took longer than the limit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml
from hypothesis import HealthCheck, Phase, given, settings, target
from hypothesis import strategies as st

from bexp.explorer.formats.document import MAX_BYTES, FormatError, load_document
from bexp.explorer.formats.request import parse_request

LIMIT_SECONDS = 0.25
REPEATS = 3

MODEL = {
    "num_layers": 4096,
    "hidden_size": 1024,
    "ffn_hidden_size": 4096,
    "num_attention_heads": 1024,
    "vocab_size": 32000,
    "seq_length": 4096,
}
EXPERTS = {"num_experts": 1023, "top_k": 1, "expert_ffn_hidden_size": 64, "first_k_dense": 4095}
BASES: tuple[dict[str, Any], ...] = (
    {"model": MODEL},
    {"model": {**MODEL, "position": "none", "moe": EXPERTS}},
    {"model": {**MODEL, "position": "none", "moe": {**EXPERTS, "first_k_dense": 0, "moe_layer_frequency": 2}}},
    {"model": {"model_type": "llama"}},
    {"target": "bexp", "model": {"model_type": "qwen3_moe", "num_hidden_layers": 4096, "mlp_only_layers": []}},
    {"target": "bexp", "model": {"model_type": "mistral"}},
    {"model": {"num_heads": 12, "moe": {"num_experts": 8, "top_k": 2}}},
    {"trainer": {"init": {"model": {"num_heads": 12}, "callbacks": [{"GlobalFlags": {}}]}, "fit": {}}},
    {"runconfig": {"num_csx": 1}, "train_input": {"batch_size": 8}, "model": {"num_heads": 12}},
    {"target": "registered", "target_config": {}},
)
SPACES: tuple[dict[str, Any], ...] = (
    {},
    {"micro_batch_size": list(range(193, 257))},
    {"micro_batch_size": "auto", "batch_size": 720720, "num_devices": 2520, "context_parallel": {"sizes": "explore"}},
    {"sharding_levels": "explore", "num_devices": 4096, "batch_size": 1 << 20},
)
FIELDS = (
    *("micro_batch_size", "num_query_groups", "recompute", "losses", "sharding_levels", "notices", "unknown", "mode"),
    *("hf_config", "target_config", "bta", "routing", "training", "context_parallel", "budget", "model", "trainer"),
    *("model.num_query_groups", "model.moe", "model.name", "model.mlp_only_layers", "model.layer_types", "model.moe.x"),
    *("model.id2label", "model.rope_scaling", "model.nonlinearity", "model.text_config", "routing.shares", "bta.tiles"),
    *("training.lora", "training.sharding", "context_parallel.sizes", "trainer.init.callbacks", "trainer.fit"),
    *("trainer.init.optimizer", "micro_batch_size.explore", "target_config.x", "model._name_or_path"),
)

Filler = Callable[[int, Any], Any]
FILLERS: dict[str, Filler] = {
    "list": lambda n, leaf: [leaf] * n,
    "numbers": lambda n, _: list(range(n)),
    "mapping": lambda n, leaf: {f"k{i}": leaf for i in range(n)},
    "lists": lambda n, leaf: [[leaf] for _ in range(n // 2)],
    "mappings": lambda n, leaf: [{"a": leaf} for _ in range(n // 3)],
    "text": lambda n, _: "x" * n,
    "digits": lambda n, _: int("9" * min(n, 4000)),
    "nested": lambda n, leaf: _nest(min(n, 31), leaf),
    "known": lambda n, _: {name: list(range(n // len(FIELDS))) for name in FIELDS},
}
LEAVES: tuple[Any, ...] = (1, 0, -1, 1.5, "", "x", "explore", None, True, [], {}, "\u00e9", "../x")


@dataclass
class Slowest:
    """The request that took longest so far."""

    seconds: float = 0.0
    text: str = ""
    taken: list[float] = field(default_factory=list)

    def read(self, text: str) -> float:
        """Read a request; return the seconds of CPU time that this takes."""
        seconds = measure(text)
        if seconds > max(self.seconds, LIMIT_SECONDS / 4):
            seconds = min(seconds, *(measure(text) for _ in range(REPEATS - 1)))
        self.taken.append(seconds)
        if seconds > self.seconds:
            self.seconds, self.text = seconds, text
        return seconds


def measure(text: str) -> float:
    """Return the CPU seconds of this thread to read a request and to write it out as it is stored."""
    start = time.thread_time()
    try:
        request = parse_request(load_document(text))
        request.model_dump_json()
    except FormatError as error:
        str(error)
    return time.thread_time() - start


def search(examples: int, *, derandomize: bool) -> Slowest:
    """Look at so many requests, and climb towards the slowest."""
    slowest = Slowest()

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=derandomize,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.target],
    )
    @given(texts())
    def look(text: str) -> None:
        target(slowest.read(text), label="CPU seconds")

    look()
    return slowest


@st.composite
def texts(draw: st.DrawFn) -> str:
    """A request of at most 256 KiB as JSON or YAML."""
    document: dict[str, Any] = json.loads(json.dumps(draw(st.sampled_from(BASES)) | draw(st.sampled_from(SPACES))))
    size = draw(st.sampled_from((1, 100, 1000, 6000, 9900, 19000, 60000, 120000)))
    for name in draw(st.lists(st.sampled_from(FIELDS), max_size=3, unique=True)):
        filler = FILLERS[draw(st.sampled_from(sorted(FILLERS)))]
        put(document, name.split("."), filler(size, draw(st.sampled_from(LEAVES))))
    text = json.dumps(document, separators=(",", ":"))
    if len(text) > MAX_BYTES:
        text = text[:MAX_BYTES]
    form = draw(st.sampled_from(("json", "json", "yaml", "flow", "endless")))
    if form == "yaml" and len(text) < MAX_BYTES // 8:
        return str(yaml.dump(document, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper)))
    if form == "flow":
        return "a: " + text
    if form == "endless":  # integers to the base of 60, comments, keys and text without an end
        return "a: 1" + draw(st.sampled_from((":1", "\n#", "_1", "\n? x", " x", "\n- ", "0", "e1"))) * min(size, 80_000)
    return text


def put(document: dict[str, Any], path: list[str], value: Any) -> None:
    """Set a field of a document, and the sections that lead to it."""
    *parents, last = path
    section = document
    for key in parents:
        inner = section.get(key)
        section[key] = inner if isinstance(inner, dict) else {}
        section = section[key]
    section[last] = value


def _nest(depth: int, leaf: Any) -> Any:
    for _ in range(depth):
        leaf = [leaf]
    return leaf


def _report(slowest: Slowest) -> Iterator[str]:
    ordered = sorted(slowest.taken)
    yield f"requests {len(ordered)}, median {1e3 * ordered[len(ordered) // 2]:.1f} ms"
    yield f"p99.9 {1e3 * ordered[int(0.999 * (len(ordered) - 1))]:.1f} ms, slowest {1e3 * slowest.seconds:.1f} ms"
    yield f"slowest: {len(slowest.text)} bytes: {slowest.text[:400]}"


def main() -> int:
    """Search, print the slowest, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=20_000)
    slowest = search(parser.parse_args().examples, derandomize=False)
    for line in _report(slowest):
        print(line)  # noqa: T201 - the command's output
    return int(slowest.seconds > LIMIT_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
