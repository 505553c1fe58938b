"""A seeded sample of a Cosmic Ray session, and what became of it: docs/contributing.md has the commands.

python -m benchmarks.mutants SESSION --keep 120 --seed 2   # forgets all other mutants
python -m benchmarks.mutants SESSION                       # each mutant that was judged, by file and line
"""

from __future__ import annotations

import argparse
import sqlite3

import numpy as np

WAITING = "FROM mutation_specs WHERE job_id NOT IN (SELECT job_id FROM work_results)"
ORDER = "ORDER BY module_path, start_pos_row, start_pos_col, operator_name, operator_args"
JUDGED = """SELECT lower(test_outcome), module_path || ':' || start_pos_row, operator_name
  FROM mutation_specs JOIN work_results USING (job_id) WHERE worker_outcome = 'NORMAL'"""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("session")
    parser.add_argument("--keep", type=int)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    with sqlite3.connect(options.session) as session:
        if options.keep is not None:
            waiting = session.execute(f"SELECT job_id {WAITING} {ORDER}").fetchall()
            others = np.random.default_rng(options.seed).permutation(waiting)[options.keep :].tolist()
            for table in ("mutation_specs", "work_items"):
                session.executemany(f"DELETE FROM {table} WHERE job_id = ?", others)  # noqa: S608 - the table is ours
            return
        rows = session.execute(f"{JUDGED} {ORDER}").fetchall()
    for outcome, place, operator in rows:
        print(f"{outcome:9} {place} {operator.removeprefix('core/')}")
    print(f"{sum(row[0] != 'survived' for row in rows)} of {len(rows)} killed")


if __name__ == "__main__":
    main()
