"""Sequences that several devices share: attention alone by layout and peer, and whole training steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.context_parallel_peers import PEERS
from benchmarks.readme.results import measured_on, table

LAYOUTS = ("ring", "striped", "zigzag")
LONGEST, LONG = 262144, 65536
ATTENTION_OVER_RING, STEP_OVER_RING, LEAST_OVER_RING, SHARE_OF_IDEAL = 1.6, 1.45, 0.98, 0.9
"""Goals; the first two on 4 devices at the longest length, the last on 8 from 65536 tokens on."""

Row = dict[str, Any]


def attention(results: Row, name: str) -> str:
    """By length and back end: the share of the ideal and the speed over our ring, for every layout and peer."""
    cells, number = results["cells"], results["num_devices"]
    heads = results["heads"]
    say = [
        f"Attention alone on {number} devices, one causal sequence, {heads['num_heads']} heads of "
        f"{heads['head_size']}, {heads['query_groups']} key heads, {results['dtype']}, forward and backward: "
        f"share of the ideal (what {number} devices do in that time without communication), and in brackets the speed "
        f"over our `ring` (`torchrun --nproc-per-node {number} -m benchmarks.context_parallel "
        f"--out benchmarks/results/{name}.json`):\n\n"
    ]
    for backend in dict.fromkeys(cell["backend"] for cell in cells):
        own = [cell for cell in cells if cell["backend"] == backend]
        names = dict.fromkeys(name for cell in own for name in cell["timed"] if name != "alone")
        rows = [
            [
                str(cell["seq_length"]),
                f"{1e3 * cell['ideal_seconds']:.2f} ms" if cell["ideal_seconds"] else "-",
                *(_share(cell["timed"].get(contender)) for contender in names),
            ]
            for cell in own
        ]
        say += [table([f"tokens, `{backend}`", "ideal", *names], rows), "\n"]
    if rows := [*_attention_goals(cells, number)]:
        say += [table(["what", "goal", "measured"], rows), "\n"]
    say.append(f"{' '.join(_notes(results))} {measured_on(results)}\n")
    return "".join(say)


def steps(results: Row, name: str) -> str:
    """By length: seconds and tokens/s of a step for every layout, and what the explorer chose."""
    cells, setup = results["cells"], results["setup"]
    number, layers = setup["num_devices"], setup["num_layers"]
    rows = [row for cell in cells for row in _current(cell)]
    columns = sorted({(row["size"], row["layout"] or "alone") for row in rows})
    several = len({size for size, _ in columns}) > 1
    batch = "one sequence" if setup["batch_size"] == 1 else f"{setup['batch_size']} sequences"
    sizes = f"--sizes {' '.join(map(str, setup['sizes']))} " if len(setup["sizes"]) > 1 else ""
    say = [
        f"Whole training steps of {results['config']} ({layers} layers) on {number} devices, {batch} a step, "
        "micro-batch 1: seconds of a step, thousand tokens/s and device, and in brackets the speed over `ring` "
        f"(`python -m benchmarks.context_parallel_step examples/{results['config']}.yaml --num-devices {number} "
        f"{sizes}--out benchmarks/results/{name}.json`):\n\n",
        table(
            [
                "tokens",
                "recomputation",
                *(f"{size} {layout}" if several else layout for size, layout in columns),
                "peak",
                "chosen",
            ],
            [_step_row(cell, columns) for cell in cells],
        ),
        "\n",
    ]
    if goals := [*_step_goals(cells, number)]:
        say += [table(["what", "goal", "measured"], goals), "\n"]
    failed = [
        f"S={cell['seq_length']} {run['layout'] or 'alone'} {run['recompute']}: {run['outcome']}"
        for cell in cells
        for run in cell["runs"]
        if run["outcome"] not in {"ok", "contaminated"}
    ]
    if failed:
        say.append(f"Failed: {'; '.join(failed)}. ")
    if results.get("left_out"):
        say.append(f"Left out for want of time: {', '.join(results['left_out'])}. ")
    say.append(f"{measured_on(results)}\n")
    return "".join(say)


def _share(run: Row | None) -> str:
    if run is None:
        return "-"
    share = f"{run['share_of_ideal']:.0%}" if run["share_of_ideal"] else "-"
    return share + (f" ({run['speed_over_ring']:.2f}x)" if run["speed_over_ring"] else "")


def _fastest(cells: Iterable[Row], length: int, names: Iterable[str]) -> Row | None:
    """Of these contenders at a length, with any back end."""
    wanted = tuple(names)
    found = [
        run | {"name": name, "backend": cell["backend"]}
        for cell in cells
        if cell["seq_length"] == length
        for name, run in cell["timed"].items()
        if name in wanted
    ]
    return min(found, key=lambda run: float(run["seconds"]), default=None)


def _attention_goals(cells: list[Row], number: int) -> Iterator[list[str]]:
    """Every contender with the back end that is fastest for it."""
    lengths = sorted({cell["seq_length"] for cell in cells})
    over = {}
    for length in lengths:
        striped, ring = (_fastest(cells, length, (name,)) for name in ("striped", "ring"))
        if striped and ring:
            over[length] = ring["seconds"] / striped["seconds"]
    yield from _over_ring(over, number, "attention", ATTENTION_OVER_RING)
    shares = {
        length: best
        for length in lengths
        if length >= LONG and (best := _fastest(cells, length, ("striped", "zigzag"))) and best["share_of_ideal"]
    }
    if shares and number == 8:
        least = min(best["share_of_ideal"] for best in shares.values())
        found = ", ".join(
            f"{best['share_of_ideal']:.0%} at {length} ({best['name']}, `{best['backend']}`)"
            for length, best in shares.items()
        )
        goal = f">= {SHARE_OF_IDEAL:.0%}"
        yield [
            f"share of ideal from {LONG} tokens on, 8 devices",
            goal,
            f"{_word(least >= SHARE_OF_IDEAL)}: {found}",
        ]
    peers = [name for cell in cells for name in cell["timed"] if name not in {*LAYOUTS, "alone"}]
    ratios = {}
    for length in lengths:
        own, peer = _fastest(cells, length, LAYOUTS), _fastest(cells, length, peers)
        if own and peer:
            ratios[length] = (peer["seconds"] / own["seconds"], peer["name"])
    if ratios:
        found = ", ".join(f"{ratio:.2f}x at {length} ({name})" for length, (ratio, name) in ratios.items())
        met = min(ratio for ratio, _ in ratios.values()) >= 1
        yield ["the fastest of ours over the fastest peer", ">= 1.0x", f"{_word(met)}: {found}"]


def _over_ring(over: dict[int, float], number: int, what: str, goal: float) -> Iterator[list[str]]:
    """`over` by length."""
    if LONGEST in over and number == 4:
        found = over[LONGEST]
        yield [
            f"striped over ring, {what}, {LONGEST} tokens, 4 devices",
            f">= {goal}x",
            f"{_word(found >= goal)}: {found:.2f}x",
        ]
    if over:
        least = min(over, key=lambda length: over[length])
        yield [
            f"striped over ring, {what}, every length",
            f">= {LEAST_OVER_RING}x",
            f"{_word(over[least] >= LEAST_OVER_RING)}: {over[least]:.2f}x at the least, with {least} tokens",
        ]


def _notes(results: Row) -> Iterator[str]:
    """Which contenders did not run, and what the public ring implementation ran on."""
    peer = results.get("ring_flash_attn", {})
    if "kernels" in peer:
        yield (
            f"`rfa` is ring-flash-attention ({peer['version']}) on "
            + (
                "the same block kernels as ours, with a copy of each block's gradients."
                if peer["kernels"].startswith("torch")
                else f"{peer['kernels']}."
            )
        )
    elif peer:
        yield f"ring-flash-attention was left out: {peer['reason']}."
    absent: dict[str, list[str]] = {}
    for backend, checks in results["checks"].items():
        for name, check in checks.items():
            if "reason" in check and not ("reason" in peer and name in PEERS):
                absent.setdefault(check["reason"].rstrip("."), []).append(f"{name} ({backend})")
    for reason, names in absent.items():
        yield f"Not run: {', '.join(names)}: {reason}."


def _current(cell: Row) -> list[Row]:
    """The rows with the policy that all layouts of a size were run with in the end."""
    exhausted = {(run["size"], run["recompute"]) for run in cell["runs"] if run["outcome"] == "out_of_memory"}
    return [row for row in cell["layouts"] if (row["size"], row["recompute"]) not in exhausted]


def _step_row(cell: Row, columns: list[tuple[int, str]]) -> list[str]:
    rows = {(row["size"], row["layout"] or "alone"): row for row in _current(cell)}
    policies = ", ".join(dict.fromkeys(row["recompute"] for row in rows.values())) or "-"
    peak = max((row["peak_bytes"] for row in rows.values()), default=None)
    return [
        str(cell["seq_length"]),
        policies,
        *(_step(rows.get(column)) for column in columns),
        "-" if peak is None else f"{peak / 2**30:.1f} GiB",
        _chosen(cell["choice"]),
    ]


def _step(row: Row | None) -> str:
    if row is None:
        return "-"
    over = f" ({row['speed_over_ring']:.2f}x)" if row["speed_over_ring"] and row["layout"] != "ring" else ""
    contaminated = " contaminated" if row["contaminated"] else ""
    return f"{row['step_seconds']:.3f} s, {row['tokens_per_second'] / 1e3:.1f}{over}{contaminated}"


def _chosen(choice: Row | None) -> str:
    if choice is None or choice["chosen"] is None:
        return "-"
    chosen = choice["chosen"]
    name = f"{chosen['size']} {chosen['layout']}" if chosen["layout"] else "alone"
    share = choice["share_of_best"]
    return f"{name}, {choice['reason']}" if share is None else f"{name}, {share:.1%} of the fastest"


def _step_goals(cells: list[Row], number: int) -> Iterator[list[str]]:
    over = {
        cell["seq_length"]: row["speed_over_ring"]
        for cell in cells
        for row in _current(cell)
        if (row["size"], row["layout"]) == (number, "striped") and row["speed_over_ring"]
    }
    yield from _over_ring(over, number, "whole step", STEP_OVER_RING)
    choices = [cell["choice"] for cell in cells if cell["choice"]]
    if choices:
        within = sum(choice["within_tolerance"] is True for choice in choices)
        yield [
            "the explorer's choice of layout and size, within 1% of the fastest",
            "in every cell",
            f"{_word(within == len(choices))}: in {within} of {len(choices)}",
        ]


def _word(met: bool) -> str:
    return "reached" if met else "missed"
