"""The results that only a GPU can refresh."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks import fused_choice, kernels, moe_layer, moe_turns
from benchmarks.refresh.build import COMPILED_DENSE
from benchmarks.refresh.result import Recorded, Results, Step
from benchmarks.refresh.waiting import VARIANTS, write_configs
from bexp.kernels.experts.auto.digest import kernels_digest
from bexp.workers.process.kernel_cache import LIBRARY_FOLDERS

GEMM_CONTENDERS = ("loop", "bmm", "grouped_mm", "hopper_grouped", "auto", "auto_counted")
BUILT_GEMMS = ("hopper_grouped", "triton_grouped")
BUILT_LAYERS = ("fused", "hopper_grouped", "triton_grouped", "fused compile", "grouped_mm compile", "block_sparse")
GOAL_MODELS = ((128, 1), (8, 2))
OTHER_MODELS = ((128, 8), (128, 2), (8, 1), (8, 8))
GOAL_CELLS = tuple(cell for cell in moe_turns.CELLS if cell[:2] in GOAL_MODELS)
PUBLISHED = ("235b-a22b-tp2-ep8-fsdp", "235b-a22b-tp2-pp8-ep32", "235b-a22b-tp4-pp8-ep8")
FAULTS, ROUNDS = ("leak", "out_of_memory"), 20
SANITIZERS = ("memcheck", "racecheck", "synccheck")
WHOLE = "all"
"""The one row of a result that is measured as a whole."""


def catalogue() -> tuple[Recorded, ...]:
    """All of them. Values say what a row is worth to a reader; a row of the layers' goals is worth most."""
    return (*_kernels(), *_services(), *_checks())


def python(module: str, *arguments: str) -> list[str]:
    """Return a command of this interpreter."""
    return [sys.executable, "-W", "ignore", "-m", module, *arguments]


def _kernels() -> Iterator[Recorded]:
    yield Recorded(
        "moe-turns-goals",
        "h100-moe-turns.json",
        tuple(map(_cell, GOAL_CELLS)),
        _turns,
        _turns_command,
        row_seconds=25,
        value=10,
        builds=_layers(COMPILED_DENSE, *BUILT_LAYERS, micro_batches=(4, 1)),
        large_builds=_layers(COMPILED_DENSE, "fused", "fused compile", micro_batches=(64,)),
    )
    yield Recorded(
        "moe-turns",
        "h100-moe-turns.json",
        tuple(map(_cell, moe_turns.CELLS)),
        _turns,
        _turns_command,
        row_seconds=25,
        value=4,
        start_seconds=60,  # the largest cell takes several times as long as the others
    )
    yield Recorded(
        "grouped-gemm",
        "h100-grouped-gemm.json",
        tuple(map(_gemm_cell, kernels.empty_cells(quick=False))),
        lambda found: [_gemm_cell(cell) for cell in found["cells"] if cell["runs"]],
        lambda step: python(
            *("benchmarks.kernels", "--out", str(step.out), "--minutes", _minutes(step, 20)),
            *("--contenders", *GEMM_CONTENDERS),
        ),
        row_seconds=4,
        value=1.5,
        start_seconds=30,
        builds=tuple(_build("gemm", name, experts) for experts in reversed(kernels.EXPERTS) for name in BUILT_GEMMS),
    )
    yield Recorded(
        "launch-cost",
        "h100-launch-cost.json",
        (WHOLE,),
        lambda found: [WHOLE] if found.keys() >= {"gemms", "layers"} else [],
        lambda step: python("benchmarks.launch_cost", "--out", str(step.out)),
        row_seconds=25,
        value=5,
    )
    yield Recorded(
        "fused-choice",
        "h100-fused-choice.json",
        tuple(f"{name}/{tokens}" for name, (_, sizes) in fused_choice.MODELS.items() for tokens in sizes),
        lambda found: [f"{row['model']}/{row['layer']['num_tokens']}" for row in found["rows"]],
        lambda step: python("benchmarks.fused_choice", "--out", str(step.out)),
        row_seconds=8,
        value=0.5,
    )
    yield Recorded(
        "moe-layer",
        "h100-moe-layer.json",
        tuple(f"{kind}/{e}/{k}/{m}" for kind, e, k, sizes in moe_layer.layer_cells(quick=False) for m in sizes),
        _layer_cells,
        lambda step: python("benchmarks.moe_layer", "--out", str(step.out), "--seconds", _seconds(step, 60)),
        row_seconds=14,
        value=1,
        start_seconds=60,
        builds=_layers(*BUILT_LAYERS, models=OTHER_MODELS, micro_batches=(1,)),
        large_builds=_layers("fused", "fused compile", models=OTHER_MODELS, micro_batches=(64,)),
    )
    yield Recorded(
        "expert-modes",
        "h100x2-expert-modes.json",
        (WHOLE,),
        lambda found: [WHOLE] if found["rows"] else [],
        lambda step: python(
            *("torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("-m", "benchmarks.expert_modes", "--out", str(step.out)),
        ),
        row_seconds=60,
        value=3,
        num_devices=2,
    )


def _services() -> Iterator[Recorded]:
    yield Recorded(
        "waiting",
        "h100-explorations.json",
        tuple(VARIANTS),
        lambda found: [run["name"] for run in found["runs"] if run["state"] == "succeeded"],
        _waiting_command,
        row_seconds=35,
        value=4,
        start_seconds=60,
        environment={variable: str(_kernel_cache() / name) for variable, name in LIBRARY_FOLDERS.items()},
    )
    yield Recorded(
        "published-plans",
        "h100-published-plans.json",
        PUBLISHED,
        lambda found: [n for n, row in found["rows"].items() if row.get("kernels_digest") == kernels_digest()],
        lambda step: python(
            *("benchmarks.published_plans", "--again", "--device", step.device, "--out", str(step.out)),
            *("--minutes", _minutes(step, 30), "--rows", *step.missing),
        ),
        row_seconds=30,
        value=3,
        of_kernels=False,
    )


def _checks() -> Iterator[Recorded]:
    yield Recorded(
        "sanitizer",
        "h100-sanitizer.json",
        SANITIZERS,
        lambda found: [each["tool"] for each in found["reports"] if each["outcome"] in ("clean", "errors")],
        lambda step: python(
            *("tests.gpu.sanitizer", "--tools", *SANITIZERS, "--out", str(step.out)),
            *("--seconds", _seconds(step, 60)),
        ),
        row_seconds=30,
        value=3,
        start_seconds=40,
    )
    yield Recorded(
        "gpu-faults",
        "h100-gpu-faults.jsonl",
        tuple(f"{kind} {number}" for kind in FAULTS for number in range(ROUNDS)),
        _rounds,
        lambda step: python(
            *("tests.chaos.gpu_faults", "--device", step.device, "--rounds", str(ROUNDS), "--cold-share", "0"),
            *("--minutes", _minutes(step, 10), "--output", str(step.out)),
            *("--kinds", *dict.fromkeys(row.rpartition(" ")[0] for row in step.missing)),
        ),
        row_seconds=8,
        value=2,
        of_kernels=False,
        summary="h100-gpu-faults.json",
        summarize=lambda path: python("tests.chaos.gpu_faults", "--summary", "--output", str(path)),
    )
    yield Recorded(
        "gpu-tests",
        "gpu-tests.jsonl",
        (WHOLE,),
        lambda found: [],
        lambda step: python("tests.gpu", "--minutes", _minutes(step, 20), "--results", str(step.out)),
        row_seconds=420,
        value=5,
        of_kernels=False,
    )


def _turns(found: Results) -> list[str]:
    left = set(moe_turns.missing(found["rows"]))
    return [_cell(cell) for cell in moe_turns.CELLS if cell not in left]


def _turns_command(step: Step) -> list[str]:
    return python(
        *("benchmarks.moe_turns", "--out", str(step.out), "--minutes", _minutes(step, 35), "--cells", *step.missing)
    )


def _waiting_command(step: Step) -> list[str]:
    """The cache of kernels is emptied if the run that needs an empty one is missing."""
    if next(iter(VARIANTS)) in step.missing:
        shutil.rmtree(_kernel_cache(), ignore_errors=True)
    configs = write_configs(step.out.parent / "waiting", step.missing)
    return python(*("benchmarks.explorations", *configs, "--resume", "--device", step.device, "--out", str(step.out)))


def _kernel_cache() -> Path:
    """A cache that no other result fills, whatever the caller's own variables say."""
    return Path(tempfile.gettempdir()) / f"bexp-refresh-kernels-{os.getuid()}"


def _layer_cells(found: Results) -> list[str]:
    """The cells that are whole: a run that was stopped does not say which are."""
    if "left_out" not in found:
        return []

    def name(row: Results) -> str:
        return "/".join(str(row.get(key)) for key in ("kind", "num_experts", "top_k", "micro_batch_size"))

    left = {name(row) for row in found["left_out"]}
    return sorted({name(row) for row in found["rows"]} - left)


def _rounds(found: Results) -> list[str]:
    counts = Counter(line["kind"] for line in found["lines"] if not line.get("dropped"))
    return [f"{kind} {number}" for kind in FAULTS for number in range(counts[kind])]


def _cell(cell: tuple[int, int, int]) -> str:
    return "/".join(map(str, cell))


def _gemm_cell(cell: Results) -> str:
    return f"{cell['experts']}/{cell['tokens']}/{cell['distribution']}"


def _minutes(step: Step, reserve: float) -> str:
    """The minutes after which nothing more begins: `reserve` seconds are for what runs then."""
    return f"{max(1.0, step.seconds - reserve) / 60:.2f}"


def _seconds(step: Step, reserve: float) -> str:
    """As `_minutes`, for commands that take seconds."""
    return f"{max(30.0, step.seconds - reserve):.0f}"


def _build(kind: str, contender: str, *sizes: int) -> tuple[str, ...]:
    return tuple(python("benchmarks.refresh.build", kind, contender, *map(str, sizes)))


def _layers(
    *contenders: str, models: tuple[tuple[int, int], ...] = GOAL_MODELS, micro_batches: tuple[int, ...]
) -> tuple[tuple[str, ...], ...]:
    return tuple(_build("layer", name, *model, *micro_batches) for name in contenders for model in models)
