"""The README's sections on shared sequences, from results written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.context_parallel_summary import summarize
from benchmarks.readme import results as files
from benchmarks.readme.context_parallel import attention, steps
from benchmarks.readme.sections import SECTIONS, fill

ENVIRONMENT = {"date": "2026-11-21T01:00:00", "packages": {"torch": "2.11.0"}}


def _cell(seq_length: int, backend: str, **seconds: float) -> dict[str, Any]:
    """Two seconds are the ideal."""
    timed = {
        name.replace("_", " "): {"seconds": s, "share_of_ideal": 2 / s, "speed_over_ring": seconds["ring"] / s}
        for name, s in seconds.items()
    }
    return {"seq_length": seq_length, "backend": backend, "ideal_seconds": 2.0, "timed": timed}


def _attention(number: int, *cells: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "environment": ENVIRONMENT,
        "device": "a card",
        "num_devices": number,
        "heads": {"num_heads": 32, "query_groups": 8, "head_size": 64},
        "dtype": "bfloat16",
        "checks": {"flash": {"ring": {"errors": {}}}},
        "cells": list(cells),
        "ring_flash_attn": {"version": "0.1.8", "kernels": "torch's, as our layouts"},
    } | more


def _run(layout: str | None, seconds: float, *, size: int = 4, **more: Any) -> dict[str, Any]:
    whole = {"micro_step_seconds": seconds, "optimizer_seconds": 0.0, "peak_bytes": 3 << 30, "reserved_bytes": 4 << 30}
    own = {"size": size, "layout": layout, "recompute": "none", "outcome": "ok", "reason": None}
    return own | {"step_seconds": seconds, "tokens_per_second": 4000 / seconds, "whole_model": whole} | more


def _steps(*runs: dict[str, Any], chosen: str | None = "striped", **more: Any) -> dict[str, Any]:
    candidate = {
        "micro_batch_size": 1,
        "attention_backend": "cudnn",
        "num_query_groups": 8,
        "context_parallel_size": 4,
        "context_parallel_layout": chosen,
    }
    cell: dict[str, Any] = {
        "seq_length": 262144,
        "attention": "cudnn",
        "runs": list(runs),
        "search": chosen
        and {
            "candidate": candidate,
            "tolerance": 0.01,
            "confidence": 95,
            "seconds": 9.0,
            "reason": None,
            "tokens_per_second": 1.0,
        },
    }
    summarize(cell)
    return {
        "environment": ENVIRONMENT,
        "device": "a card",
        "config": "small",
        "setup": {"num_devices": 4, "num_layers": 16, "batch_size": 1, "sizes": [4]},
        "cells": [cell],
        "left_out": [],
    } | more


def _line(text: str, label: str) -> list[str]:
    (found,) = (line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith(f"| {label}"))
    return found[1:]


def test_sections_appear_with_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "RESULTS", tmp_path)
    for name in SECTIONS:
        monkeypatch.setitem(SECTIONS, name, str)
    empty = "".join(
        f"<!-- {name} -->\n<!-- /{name} -->\n" for name in (*SECTIONS, "context-parallel", "context-parallel-step")
    )
    assert fill(empty) == empty
    for number in (4, 8):
        found = _attention(number, _cell(16384, "flash", ring=4.0, striped=3.0))
        (tmp_path / f"h200x{number}-context-parallel.json").write_text(json.dumps(found))
    (tmp_path / "h200x4-context-parallel-step.json").write_text(json.dumps(_steps(_run("ring", 3.0), chosen="ring")))
    text = fill(empty)
    assert "Whole training steps of small" in text
    assert "Attention alone on 4 devices" in text
    assert "Attention alone on 8 devices" in text
    assert fill(text) == text
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 6
    assert all(len({line.count(" | ") for line in lines if line.startswith("|")}) == 1 for lines in tables)


def test_attention_is_compared_by_the_fastest_back_end() -> None:
    cells = (
        _cell(65536, "flash", ring=4.0, striped=2.5, zigzag=2.4, rfa_zigzag=2.2),
        _cell(65536, "cudnn", ring=3.0, striped=2.1, zigzag=2.3),
        _cell(262144, "flash", ring=4.0, striped=2.4, zigzag=2.6, rfa_zigzag=3.0),
    )
    text = attention(_attention(4, *cells), "x")
    assert _line(text, "262144") == ["2000.00 ms", "50% (1.00x)", "83% (1.67x)", "77% (1.54x)", "67% (1.33x)"]
    assert _line(text, "striped over ring, attention, 262144")[-1] == "reached: 1.67x"
    assert _line(text, "striped over ring, attention, every")[-1] == "reached: 1.43x at the least, with 65536 tokens"
    peers = _line(text, "the fastest of ours")[-1]
    assert peers == "reached: 1.05x at 65536 (rfa zigzag), 1.25x at 262144 (rfa zigzag)"
    assert "share of ideal from" not in text
    assert "the same block kernels as ours" in text

    text = attention(_attention(8, *cells), "x")
    assert "striped over ring, attention, 262144" not in text
    shares = _line(text, "share of ideal from")
    assert shares[-1] == "missed: 95% at 65536 (striped, `cudnn`), 83% at 262144 (striped, `flash`)"


def test_contenders_that_did_not_run_are_named_with_their_reasons() -> None:
    checks = {"flash": {"torch allgather": {"reason": "no."}, "torch alltoall": {"reason": "no."}, "rfa ring": {}}}
    checks["flash"]["rfa ring"] = {"reason": "PeerMissingError: it is not installed"}
    found = _attention(4, _cell(16384, "flash", ring=4.0), checks=checks, ring_flash_attn={"reason": "not installed"})
    text = attention(found, "x")
    assert "Not run: torch allgather (flash), torch alltoall (flash): no. " in text
    assert "ring-flash-attention was left out: not installed." in text
    assert "PeerMissingError" not in text


def test_steps_show_layouts_and_what_was_chosen() -> None:
    found = _steps(_run("ring", 3.0), _run("ring", 3.2), _run("striped", 2.0), _run("zigzag", 2.01))
    text = steps(found, "x")
    assert _line(text, "262144") == [
        "none",
        "3.100 s, 1.3",
        "2.000 s, 2.0 (1.55x)",
        "2.010 s, 2.0 (1.54x)",
        "3.0 GiB",
        "4 striped, 100.0% of the fastest",
    ]
    assert _line(text, "striped over ring, whole step, 262144")[-1] == "reached: 1.55x"
    assert _line(text, "the explorer's choice")[-1] == "reached: in 1 of 1"
    assert "(16 layers) on 4 devices, one sequence a step" in text

    text = steps(_steps(_run("ring", 3.0), _run("striped", 2.0), chosen="ring"), "x")
    assert _line(text, "262144")[-1] == "4 ring, 66.7% of the fastest"
    assert _line(text, "the explorer's choice")[-1] == "missed: in 0 of 1"


def test_steps_show_the_last_policy_and_tell_what_failed() -> None:
    failed = {"outcome": "out_of_memory", "reason": "no", "step_seconds": 0, "whole_model": None}
    runs = [_run("ring", 3.0), _run("striped", 2.0) | failed]
    runs += [_run(layout, 4.0, recompute="full") for layout in ("ring", "striped")]
    found = _steps(*runs, chosen=None, left_out=["S=16384"])
    text = steps(found, "x")
    assert _line(text, "262144") == ["full", "4.000 s, 1.0", "4.000 s, 1.0 (1.00x)", "3.0 GiB", "-"]
    assert "Failed: S=262144 striped none: out_of_memory." in text
    assert "Left out for want of time: S=16384." in text


def test_sizes_are_columns_and_tainted_times_are_marked() -> None:
    sound, shared = _run("ring", 2.0, size=2), _run("ring", 9.0, size=2, outcome="contaminated")
    runs = [_run(None, 2.5, size=1, outcome="contaminated"), sound, shared, _run("ring", 3.0)]
    text = steps(_steps(*runs, chosen=None), "x")
    assert "| tokens | recomputation | 1 alone | 2 ring | 4 ring | peak | chosen |" in text
    assert _line(text, "262144")[1:4] == ["2.500 s, 1.6 contaminated", "2.000 s, 2.0", "3.000 s, 1.3"]
