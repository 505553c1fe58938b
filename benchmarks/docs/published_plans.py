"""Plans beside what others published of the same meshes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.docs.results import Row, goal_table, measured_on, table

MEDIAN_ERROR, MAX_ERROR, NUM_ROWS = 0.12, 0.25, 12


def published_plans(result: Row) -> str:
    """The rows with their errors and parts, the goals, the sources, and what was left out."""
    rows = [{"name": name, **row} for name, row in result["rows"].items()]
    done = [row for row in rows if "predicted" in row]
    failed = "".join(f"- `{row['name']}` was not predicted: {row['reason']}.\n" for row in rows if "reason" in row)
    figures = table(
        done,
        {
            "row": lambda row: f"`{row['name']}`",
            "devices": lambda row: f"{row['request']['num_devices']:,}",
            "mesh": mesh_of,
            "micro-batch": lambda row: row["request"]["micro_batch_size"],
            "published": lambda row: f"{row['published']:,.0f}",
            "predicted": lambda row: f"{row['predicted']:,.0f}",
            "error": lambda row: f"{row['error']:+.1%}",
            "computation": lambda row: f"{row['compute_share']:.0%}",
            "exchange": lambda row: f"{row['exchange_share']:.0%}",
            "bubble": lambda row: f"{row['bubble_share']:.0%}",
        },
    )
    utilisation = table(
        done,
        {
            "row": lambda row: f"`{row['name']}`",
            "model GFLOPs a token": lambda row: f"{row['model_flops_per_token'] / 1e9:,.1f}",
            "published": lambda row: f"{utilisation_of(row, 'published', result):.0%}",
            "predicted": lambda row: f"{utilisation_of(row, 'predicted', result):.0%}",
            "power limit": lambda row: power_limit(result["sources"][row["source"]]),
        },
    )
    kept = "".join(f"- `{row['name']}` keeps the figures of its run: {row['kept']}.\n" for row in done if "kept" in row)
    notes = "".join(f"- {note}: {names}.\n" for note, names in notes_of(done))
    used = {row["source"] for row in done}
    sources = table(
        [(name, source) for name, source in result["sources"].items() if name in used],
        {
            "source": lambda pair: f"`{pair[1]['document']}`",
            "commit": lambda pair: pair[1]["commit"][:12],
            "date": lambda pair: pair[1]["date"],
            "machine": lambda pair: pair[1]["machine"],
            "rows": lambda pair: sum(row["source"] == pair[0] for row in done),
        },
    )
    left_out = "".join(f"- {each['rows']}: {each['reason']}.\n" for each in result["left_out"])
    return (
        "## Plans beside published figures\n\n"
        "Tokens a second of each device, in BF16 on H100s. The blocks of one device were measured on one GPU, the "
        f"fabric was described as `{result['fabric']}`, and nothing was fitted to these rows "
        "(`python -m benchmarks.published_plans`).\n\n"
        f"{figures}\n{failed}{goal_table(goals_of(result['summary']))}\n{causes_text(done, result)}"
        f"{recomposed(result)}{kept}{utilisation_text(result)}\n\n{utilisation}\n{causes(done, result)}"
        f"What the rows have and the predictions have not:\n\n{notes}\n{sources}\nLeft out:\n\n{left_out}"
        f"{measured_on(result)}\n"
    )


def causes_text(rows: list[dict[str, Any]], result: Row) -> str:
    """Return what each property of the published runs changes of the error, if any was measured."""
    names = [name for name in result.get("as_run", {}) if any(name in row.get("causes", {}) for row in rows)]
    if not names:
        return ""
    found = table(
        [row for row in rows if row.get("causes")],
        {
            "row": lambda row: f"`{row['name']}`",
            "plan's defaults": lambda row: f"{next(iter(row['causes'].values())) / row['published'] - 1:+.1%}",
            **{f"`{name}`": partial(_changed, name=name) for name in names},
            "as the run": lambda row: f"{row['error']:+.1%}",
        },
    )
    reasons = "".join(f"- `{name}`: {result['as_run'][name]}.\n" for name in names)
    return (
        "The error by its causes, as far as blocks were measured both ways: with the defaults of a plan, what each "
        f"property of the published run changes of it, in percentage points, and what is left.\n\n{found}\n{reasons}\n"
    )


def _changed(row: dict[str, Any], name: str) -> str:
    """Return by how much a property of the run changes the error."""
    causes = {**row["causes"], "": row["predicted"]}
    if name not in row["causes"]:
        return ""
    places = list(causes)
    after = causes[places[places.index(name) + 1]]
    value = row["as_run"][name]
    told = value if isinstance(value, str) else ", ".join(value)
    return f"{told} {100 * (after - causes[name]) / row['published']:+.1f}"


def recomposed(result: Row) -> str:
    """Say when rows were composed again, if they were."""
    if "recomposed" not in result:
        return ""
    return (
        f"The steps were composed again on {result['recomposed'][:10]} from the same measured blocks "
        "(`--recompose`), because plans count fewer rows since then: a token travels once to each expert-parallel "
        "device that has any of its experts, as our kernels send it, and not once for each expert. Frameworks that "
        "send it once to each node, and on from there, send less between nodes.\n\n"
    )


def utilisation_text(result: Row) -> str:
    """Say what the utilisation is."""
    card = result["card"]
    peak = card["dense_bf16_flops_per_second"]
    reached = result["hardware"]["matmul_flops_per_second"]["bfloat16"] / peak
    return (
        f"Model FLOPs utilisation is the share of {peak / 1e12:,.1f} TFLOP/s, which the {card['document']} states for "
        f"dense BF16 on the {card['name']} with {card['power_watts']} W. A token has 6 FLOPs for each parameter that "
        "multiplies it, and 12 for each position of its sequence, width of all heads and layer. Recomputation does not "
        f"count. On the card that the blocks were measured on, large matrix products alone reach {reached:.0%}."
    )


def utilisation_of(row: dict[str, Any], name: str, result: Row) -> float:
    """Return the model FLOPs utilisation of a row's `published` or `predicted` tokens a second."""
    return float(row[name] * row["model_flops_per_token"] / result["card"]["dense_bf16_flops_per_second"])


def power_limit(source: dict[str, Any]) -> str:
    """Return the power limit that a source states."""
    return f"{source['power_watts']} W" if "power_watts" in source else "not stated"


def causes(rows: list[dict[str, Any]], result: Row) -> str:
    """List what sources state that may have made their runs slower than predicted."""
    found = []
    for name, source in result["sources"].items():
        own = [row for row in rows if row["source"] == name]
        if own and "possible_causes" in source:
            names = ", ".join(f"`{row['name']}` {row['error']:+.0%}" for row in own)
            found.append(f"- {names}: {source['possible_causes']}.\n")
    if not found:
        return ""
    power = "".join(map(partial(power_text, result=result), rows))
    if power:
        found.append(
            "\nWhere the power limit is lower than that of the card that measured: blocks that were held down by its "
            "limit are slower by the ratio of the limits at most, if power grows with the clock alone, and by the cube "
            "root of it at least, if voltage grows with the clock too. The error that is left would be\n\n" + power
        )
    intro = "Possible causes that sources state, where predictions are far above what was published. None was tested:"
    return f"{intro}\n\n{''.join(found)}\n"


def power_text(row: dict[str, Any], result: Row) -> str:
    """Return the errors of a row between the bounds of what a lower power limit costs; empty if it had none."""
    limit, share = result["sources"][row["source"]].get("power_watts"), row.get("power_capped_share")
    if limit is None or share is None or limit >= result["card"]["power_watts"]:
        return ""
    ratio = result["card"]["power_watts"] / limit
    low, high = ((1 + row["error"]) / (1 + share * (slower - 1)) - 1 for slower in (ratio, ratio ** (1 / 3)))
    return f"- `{row['name']}`: {low:+.0%} to {high:+.0%}, of a step with {share:.0%} in such blocks.\n"


def mesh_of(row: dict[str, Any]) -> str:
    """Return the sizes of a row's mesh that are not 1, its sharding and its recomputation."""
    asked = row["request"]["parallelism"]
    names = {"tensor": "TP", "pipeline": "PP", "virtual_stages": "VP", "expert": "EP"}
    sizes = [f"{short} {asked[name]}" for name, short in names.items() if asked.get(name, 1) > 1]
    return ", ".join([*sizes, asked["sharding"], f"recompute {row['request']['recompute'][0]}"])


def notes_of(rows: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield each note with the names of its rows."""
    for note in dict.fromkeys(note for row in rows for note in row["notes"]):
        yield note, ", ".join(f"`{row['name']}`" for row in rows if note in row["notes"])


def goals_of(summary: dict[str, Any]) -> Iterator[tuple[str, str, bool, str]]:
    """Yield the goals of the comparison."""
    yield "published rows predicted", f">= {NUM_ROWS}", summary["rows"] >= NUM_ROWS, str(summary["rows"])
    if summary["rows"]:
        median, most = summary["median_error"], summary["max_error"]
        met = median <= MEDIAN_ERROR and most <= MAX_ERROR
        goal = f"median <= {MEDIAN_ERROR:.0%}, max <= {MAX_ERROR:.0%}"
        yield "error of tokens/s of each device", goal, met, f"median {median:.1%}, max {most:.1%}"
    if summary["pairs"]:
        same = summary["pairs_in_order"]
        text = f"{same} of {summary['pairs']} pairs"
        yield "meshes of one model and table in the published order", "all", same == summary["pairs"], text
