"""Find, for each planted bug, a clause and case that catch it, and write them to killers.json.

    python -m tests.conformance.find_killers              # bugs without an entry, or whose entry is stale
    python -m tests.conformance.find_killers moe layers   # of these components only

A clause that has no bug yet is preferred. It prints what is to be done by hand: plant a bug for each clause
without one; of three bugs of a clause delete one, or name another clause for it in killers.json.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not os.path.exists("/dev/nvidia0"):  # before triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import sys
from collections import Counter

from tqdm import tqdm

from diptych.shared import registry
from diptych.shared.tools.conformance.clauses.suite import CONTRACTS, check_implementation, clauses_of
from tests.conformance.fast_cut import fast_clauses
from tests.conformance.killers import caught, killers, planted
from tests.conformance.mutants.mutant import write_killers
from tests.planted import Bug

MOST = 2
"""Bugs of a clause."""


def find_killer(bug: Bug, counts: Counter[str]) -> list[str] | None:
    """The first [clause, case] that catches the bug: clauses with few bugs first, cases of the fast cut
    before the others; None: it survives."""
    reference = registry.load(bug.where, "reference")
    for find in (fast_clauses, clauses_of):
        for clause in sorted(find(bug.where), key=lambda clause: counts[clause.name]):
            for verdict in check_implementation([clause], bug.planted, reference, shrink_failures=False):
                if not verdict.holds:
                    return [verdict.clause.name, verdict.case.name]
    return None


def wrong_counts(component: str) -> dict[str, int]:
    """Clause -> its number of bugs, where that is not one or two."""
    bugs = planted()
    counts = Counter(
        killer[0] for name, killer in killers().items() if name in bugs and bugs[name].where == component
    )
    names = [clause.name for clause in clauses_of(component)]
    return {name: counts[name] for name in names if not 1 <= counts[name] <= MOST}


def main(components: list[str]) -> int:
    """Write the file. Returns the number of bugs that survive."""
    bugs, known = planted(), killers()
    for name in set(known) - set(bugs):
        del known[name]
    chosen = [bug for bug in bugs.values() if bug.where in components]
    stale = [bug for bug in tqdm(chosen, "check") if not caught(bug)]
    for bug in stale:
        known.pop(bug.name, None)
    survivors = []
    for bug in tqdm(stale, "search"):
        counts = Counter(known[name][0] for name in known if bugs[name].where == bug.where)
        killer = find_killer(bug, counts)
        if killer is None:
            survivors.append(bug.name)
        else:
            known[bug.name] = killer
    write_killers(known)
    for name in survivors:
        print(f"survives: {name}")
    for component in components:
        for name, count in wrong_counts(component).items():
            print(f"{component}: {count} bugs of {name}")
    return len(survivors)


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:] or list(CONTRACTS))))
