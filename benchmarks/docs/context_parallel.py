"""Sequences that several devices share: attention alone by layout and implementation, and whole training steps."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.docs.results import GIB, Columns, Row, goal_table, measured_on, percent, ratio, table

LONGEST, LONG = 262144, 65536
ATTENTION_OVER_RING, STEP_OVER_RING, LEAST_OVER_RING, SHARE_OF_IDEAL = 1.6, 1.45, 0.98, 0.9
"""Goals; the first two on 4 devices at the longest length, the last on 8 from 65536 tokens on."""

Goal = tuple[str, str, bool, str]


def attention(results: Row) -> str:
    """By length and back end the share of the ideal and its spread; then the margins over ring and other code."""
    number, say = results["num_devices"], []
    for backend in dict.fromkeys(cell["backend"] for cell in results["cells"]):
        cells = [cell for cell in results["cells"] if cell["backend"] == backend]
        names = [name for name in dict.fromkeys(name for cell in cells for name in cell["timed"]) if name != "alone"]
        columns = {name: lambda cell, name=name: _share(cell["timed"].get(name)) for name in names}
        about = {
            f"tokens, `{backend}`": lambda cell: cell["seq_length"],
            "rounds": lambda cell: cell.get("rounds"),
            "ideal": lambda cell: f"{1e3 * cell['ideal_seconds']:.2f} ms" if cell["ideal_seconds"] else None,
        }
        say += [table(cells, about | columns), "\n"]
    margins = results["summary"]["ours_over_peers"]
    if margins:
        say += [table(margins, _MARGIN), "\n"]
    say += [goal_table(_attention_goals(results, number)), measured_on(results)]
    peer = results.get("ring_flash_attn", {})
    if "reason" in peer:
        say.append(f"ring-flash-attention was left out: {peer['reason']}.\n")
    absent = {
        f"{name} ({backend}): {check['reason'].rstrip('.')}"
        for backend, checks in results["checks"].items()
        for name, check in checks.items()
        if "reason" in check and not ("reason" in peer and name.startswith("rfa"))
    }
    return "".join(say) + (f"Not run: {'; '.join(sorted(absent))}.\n" if absent else "")


def steps(results: Row) -> str:
    """By length: seconds and tokens/s of a step for every layout, and what the explorer chose."""
    setup, cells = results["setup"], results["cells"]
    places = sorted({(row["size"], row["layout"] or "alone") for cell in cells for row in _current(cell)})
    columns = {f"{size} {layout}": lambda cell, at=(size, layout): _step(cell, at) for size, layout in places}
    about = {
        "tokens": lambda cell: cell["seq_length"],
        "recomputation": lambda cell: ", ".join(dict.fromkeys(row["recompute"] for row in _current(cell))),
        "runs": lambda cell: max((row["num_runs"] for row in _current(cell)), default=0),
    }
    rest = {
        "peak": lambda cell: f"{max(row['peak_bytes'] for row in _current(cell)) / GIB:.1f} GiB",
        "chosen": lambda cell: _chosen(cell["choice"]),
    }
    failed = [
        f"S={cell['seq_length']} {run['layout'] or 'alone'} {run['recompute']}: {run['outcome']}"
        for cell in cells
        for run in cell["runs"]
        if run["outcome"] not in {"ok", "contaminated"}
    ]
    say = [
        f"{results['config']} with {setup['num_layers']} layers on {setup['num_devices']} devices, "
        f"sequences a step: {setup['batch_size']}.\n\n",
        table(cells, about | columns | rest),
        "\n",
        goal_table(_step_goals(cells, setup["num_devices"])),
        measured_on(results),
        f"Failed: {'; '.join(failed)}.\n" if failed else "",
        f"Left out for want of time: {', '.join(results['left_out'])}.\n" if results.get("left_out") else "",
    ]
    return "".join(say)


_MARGIN: Columns = {
    "tokens": lambda row: row["seq_length"],
    "fastest of ours": lambda row: row["ours"],
    "fastest of the others": lambda row: row["other"],
    "ours over theirs": lambda row: ratio(row["ratio"], 3),
    "spread": lambda row: percent(row["spread"]),
    "rounds": lambda row: row["rounds"],
    "verdict": lambda row: row["verdict"],
}


def _share(run: Row | None) -> str | None:
    """Share of the ideal, speed over our ring, and the spread of the rounds as a share of their median."""
    if run is None:
        return None
    spread = percent(run["spread_seconds"] / run["seconds"]) if "spread_seconds" in run else "-"
    return f"{percent(run['share_of_ideal'], 0)}, {ratio(run['speed_over_ring'])}, {spread}"


def _attention_goals(results: Row, number: int) -> Iterator[Goal]:
    over = {row["seq_length"]: row["ratio"] for row in results["summary"]["striped_over_ring"]}
    yield from _over_ring(over, number, "attention", ATTENTION_OVER_RING)
    if number == 8:
        shares = {
            length: max(
                run["share_of_ideal"] or 0.0
                for cell in results["cells"]
                if cell["seq_length"] == length
                for name, run in cell["timed"].items()
                if name in {"striped", "zigzag"}
            )
            for length in sorted({cell["seq_length"] for cell in results["cells"]})
            if length >= LONG
        }
        if shares:
            found = ", ".join(f"{percent(share, 0)} at {length}" for length, share in shares.items())
            met = min(shares.values()) >= SHARE_OF_IDEAL
            yield f"share of the ideal from {LONG} tokens on, 8 devices", f">= {SHARE_OF_IDEAL:.0%}", met, found
    if margins := results["summary"]["ours_over_peers"]:
        words = [row["verdict"] for row in margins]
        found = ", ".join(f"{word} at {words.count(word)}" for word in ("faster", "level", "slower"))
        goal = "slower at no length, by more than the spread"
        yield "the fastest of ours against the fastest other code", goal, "slower" not in words, f"{found} lengths"


def _step_goals(cells: list[Row], number: int) -> Iterator[Goal]:
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
        what = "the explorer's choice of layout and size, within 1% of the fastest"
        yield what, "in every cell", within == len(choices), f"in {within} of {len(choices)}"


def _over_ring(over: dict[int, float], number: int, what: str, goal: float) -> Iterator[Goal]:
    if LONGEST in over and number == 4:
        found = over[LONGEST]
        yield f"striped over ring, {what}, {LONGEST} tokens, 4 devices", f">= {goal}x", found >= goal, ratio(found)
    if over:
        least = min(over, key=over.__getitem__)
        text = f"{over[least]:.2f}x at the least, with {least} tokens"
        yield (
            f"striped over ring, {what}, every length",
            f">= {LEAST_OVER_RING}x",
            over[least] >= LEAST_OVER_RING,
            text,
        )


def _current(cell: Row) -> list[Row]:
    """The rows with the policy that all layouts of a size were run with in the end."""
    exhausted = {(run["size"], run["recompute"]) for run in cell["runs"] if run["outcome"] == "out_of_memory"}
    return [row for row in cell["layouts"] if (row["size"], row["recompute"]) not in exhausted]


def _step(cell: Row, place: tuple[int, str]) -> str | None:
    row = next((row for row in _current(cell) if (row["size"], row["layout"] or "alone") == place), None)
    if row is None:
        return None
    over = f" ({row['speed_over_ring']:.2f}x)" if row["speed_over_ring"] and row["layout"] != "ring" else ""
    spread = f", spread {percent(row['spread'])}" if row["num_runs"] > 1 else ""
    other = " contaminated" if row["contaminated"] else ""
    return f"{row['step_seconds']:.3f} s{spread}, {row['tokens_per_second'] / 1e3:.1f}{over}{other}"


def _chosen(choice: Row | None) -> str | None:
    if choice is None or choice["chosen"] is None:
        return None
    chosen, share = choice["chosen"], choice["share_of_best"]
    name = f"{chosen['size']} {chosen['layout']}" if chosen["layout"] else "alone"
    return f"{name}, {choice['reason'] if share is None else f'{percent(share)} of the fastest'}"
