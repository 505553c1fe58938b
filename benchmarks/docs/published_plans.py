"""Plans beside what others published of the same meshes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

from benchmarks.docs.results import Row, goal_table, measured_on, table

MEDIAN_ERROR, MAX_ERROR, NUM_ROWS = 0.12, 0.25, 12


def published_plans(result: Row) -> str:
    """The rows with their errors and parts, the goals, the sources, and what was left out."""
    rows = [{"name": name, **row} for name, row in result["rows"].items()]
    done = [row for row in rows if "predicted" in row]
    failed = "".join(f"- `{row['name']}` was not predicted: {row['reason']}.\n" for row in rows if "reason" in row)
    columns: dict[str, Callable[[dict[str, Any]], Any]] = {
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
    }
    figures = "".join(
        f"{group_text(title, rows)}\n{table(rows, columns)}\n"
        for title, rows in groups_of(done, result).items()
        if rows
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
        "Tokens a second of each device, in BF16 on H100s; every row is shown, by what it ran on. "
        "The blocks of one device were measured on one GPU, the "
        f"fabric was described as `{result['fabric']}`, and nothing was fitted to these rows "
        "(`python -m benchmarks.published_plans`).\n\n"
        f"{figures}{failed}Over all rows:\n\n{goal_table(goals_of(result['summary']))}\n{causes_text(done, result)}"
        f"{recomposed(result)}{kept}{utilisation_text(result)}\n\n{utilisation}\n{ratios_text(result)}"
        f"{causes(done, result)}What the rows have and the predictions have not:\n\n{notes}\n{sources}\n"
        f"Left out:\n\n{left_out}{measured_on(result)}\n"
    )


def groups_of(rows: list[dict[str, Any]], result: Row) -> dict[str, list[dict[str, Any]]]:
    """Return the rows by what they ran on and what they trained."""
    found: dict[str, list[dict[str, Any]]] = {
        "Dense models on DGX H100": [],
        "Experts on DGX H100": [],
        "Other H100s": [],
    }
    for row in rows:
        other = "card" in result["sources"][row["source"]]
        kind = "Experts" if "expert" in row["request"]["parallelism"] else "Dense models"
        found["Other H100s" if other else f"{kind} on DGX H100"].append(row)
    return found


def group_text(title: str, rows: list[dict[str, Any]]) -> str:
    """Return the heading of a group with its errors."""
    errors = [abs(row["error"]) for row in rows]
    return f"**{title}**: {len(rows)} rows, error median {median(errors):.1%}, max {max(errors):.1%}.\n"


def ratios_text(result: Row) -> str:
    """Return ratios of two rows, which a card's speed cancels out of."""
    pairs = [each for each in result.get("ratios", ()) if {each["of"], each["to"]} <= result["rows"].keys()]

    def ratio_of(each: dict[str, str], name: str) -> float:
        return float(result["rows"][each["of"]][name] / result["rows"][each["to"]][name])

    found = table(
        [each for each in pairs if all("predicted" in result["rows"][each[name]] for name in ("of", "to"))],
        {
            "tokens/s of": lambda each: f"`{each['of']}`",
            "over those of": lambda each: f"`{each['to']}`",
            "what differs": lambda each: each["what"],
            "published": lambda each: f"{ratio_of(each, 'published'):.3f}",
            "predicted": lambda each: f"{ratio_of(each, 'predicted'):.3f}",
        },
    )
    return (
        f"Ratios of two rows of the same cards say what is wrong beside the speed of a card:\n\n{found}\n"
        if pairs
        else ""
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
            words = " ".join(f'"{each}"' for each in source.get("words", ()))
            found.append(f"- {names}: {source['possible_causes']}.{words and f' In its words: {words}'}\n")
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
    found += (f"- `{row['name']}`: {unstated_text(row)}.\n" for row in rows if row.get("otherwise"))
    if elsewhere := result.get("elsewhere"):
        found.append("\nWhat others published on cards of 700 W:\n\n")
        found += (f"- `{each['document']}`: {each['says']}.\n" for each in elsewhere)
    return f"{intro}\n\n{''.join(found)}\n"


def unstated_text(row: dict[str, Any]) -> str:
    """Return the errors with the settings that the source of a row may have meant."""
    return ", ".join(
        f"with {name} {' '.join(row['unstated'][name])} the error is {predicted / row['published'] - 1:+.1%}"
        for name, predicted in row["otherwise"].items()
    )


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
