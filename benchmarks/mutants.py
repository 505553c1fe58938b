"""A seeded sample of a Cosmic Ray session, and what became of it: benchmarks/README.md has the commands.

python -m benchmarks.mutants SESSION --keep 120 --seed 2   # forgets all others, and stars that are no operators
python -m benchmarks.mutants SESSION                       # each mutant that was judged, by file and line
"""

from __future__ import annotations

import argparse
import ast
import sqlite3
from functools import cache
from pathlib import Path

import numpy as np

WAITING = "FROM mutation_specs WHERE job_id NOT IN (SELECT job_id FROM work_results)"
ORDER = "ORDER BY module_path, start_pos_row, start_pos_col, operator_name, operator_args"
JUDGED = """SELECT lower(test_outcome), module_path || ':' || start_pos_row, operator_name
  FROM mutation_specs JOIN work_results USING (job_id) WHERE worker_outcome = 'NORMAL'"""


@cache
def operator_spans(path: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """From the end of the left operand to the start of the right one, of each binary operator in a file."""
    source = Path(path).read_text().encode("ascii", "replace")  # a byte a character: the columns of a session
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.BinOp)]
    ends = [(node.left.end_lineno or 0, node.left.end_col_offset or 0) for node in nodes]
    return list(zip(ends, [(node.right.lineno, node.right.col_offset) for node in nodes], strict=True))


def is_star_without_operands(path: str, operator: str, place: tuple[int, int]) -> bool:
    """Whether the mutant changes the star of an unpacking or of a parameter list: it is equivalent, or no program."""
    if not operator.startswith(("core/ReplaceBinaryOperator_Mul_", "core/ReplaceBinaryOperator_Pow_")):
        return False
    return not any(start <= place < end for start, end in operator_spans(path))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("session")
    parser.add_argument("--keep", type=int)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    with sqlite3.connect(options.session) as session:
        if options.keep is not None:
            places = "job_id, module_path, operator_name, start_pos_row, start_pos_col"
            waiting = session.execute(f"SELECT {places} {WAITING} {ORDER}").fetchall()
            stars = {job for job, path, operator, *at in waiting if is_star_without_operands(path, operator, tuple(at))}
            kept = [job for job, *_ in waiting if job not in stars]
            others = np.random.default_rng(options.seed).permutation(kept)[options.keep :].tolist()
            for table in ("mutation_specs", "work_items"):
                of_table = f"DELETE FROM {table} WHERE job_id = ?"  # noqa: S608 - the table is ours
                session.executemany(of_table, [(job,) for job in [*stars, *others]])
            return
        rows = session.execute(f"{JUDGED} {ORDER}").fetchall()
    for outcome, place, operator in rows:
        print(f"{outcome:9} {place} {operator.removeprefix('core/')}")
    print(f"{sum(row[0] != 'survived' for row in rows)} of {len(rows)} killed")


if __name__ == "__main__":
    main()
