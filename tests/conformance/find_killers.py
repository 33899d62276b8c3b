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

import json
import sys
from collections import Counter

from tqdm import tqdm

from diptych.shared import registry
from diptych.shared.tools.conformance.clauses.suite import CONTRACTS, check_implementation, clauses_of
from tests.conformance.fast_cut import fast_clauses
from tests.conformance.killers import KILLERS_FILE, Mutant, holds, killers, planted

MOST = 2
"""Bugs of a clause."""


def find_killer(mutant: Mutant, counts: Counter[str]) -> list[str] | None:
    """The first [clause, case] that catches the bug: clauses with few bugs first, cases of the fast cut
    before the others; None: it survives."""
    reference = registry.load(mutant.component, "reference")
    for find in (fast_clauses, clauses_of):
        for clause in sorted(find(mutant.component), key=lambda clause: counts[clause.name]):
            for verdict in check_implementation([clause], mutant.impl, reference, shrink_failures=False):
                if not verdict.holds:
                    return [verdict.clause.name, verdict.case.name]
    return None


def is_stale(mutant: Mutant) -> bool:
    try:
        return mutant.key not in killers() or holds(mutant, killers()[mutant.key])
    except LookupError:
        return True


def wrong_counts(component: str) -> dict[str, int]:
    """Clause -> its number of bugs, where that is not one or two."""
    counts = Counter(
        killers()[mutant.key][0]
        for mutant in planted()
        if mutant.component == component and mutant.key in killers()
    )
    names = [clause.name for clause in clauses_of(component)]
    return {name: counts[name] for name in names if not 1 <= counts[name] <= MOST}


def main(components: list[str]) -> int:
    """Write the file. Returns the number of bugs that survive."""
    mutants = {mutant.key: mutant for mutant in planted()}
    known = killers()
    for name in set(known) - set(mutants):
        del known[name]
    chosen = [mutant for mutant in mutants.values() if mutant.component in components]
    stale = [mutant for mutant in tqdm(chosen, "check") if is_stale(mutant)]
    for mutant in stale:
        known.pop(mutant.key, None)
    survivors = []
    for mutant in tqdm(stale, "search"):
        counts = Counter(known[name][0] for name in known if mutants[name].component == mutant.component)
        killer = find_killer(mutant, counts)
        if killer is None:
            survivors.append(mutant.key)
        else:
            known[mutant.key] = killer
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known))
    KILLERS_FILE.write_text(f"{{\n{lines}\n}}\n")
    for name in survivors:
        print(f"survives: {name}")
    for component in components:
        for name, count in wrong_counts(component).items():
            print(f"{component}: {count} bugs of {name}")
    return len(survivors)


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:] or list(CONTRACTS))))
