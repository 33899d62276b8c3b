"""Find, for each planted bug, the clause and case that catch it, and write them to killers.json.

    python -m tests.conformance.find_killers          # bugs without an entry, or whose entry is stale
    python -m tests.conformance.find_killers --all    # all bugs: about 15 minutes on two cores
    python -m tests.conformance.find_killers --quicker  # for bugs of slow cases, quicker ones of the fast cut

`make test` tries each bug on its named case alone; `make test-all` tries it on the whole contract.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not os.path.exists("/dev/nvidia0"):  # before triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import json
import multiprocessing
import sys
import time
from functools import cache

from tqdm import tqdm

from diptych.shared import registry
from tests.conformance.fast_cut import fast_clauses
from tests.conformance.killers import KILLERS_FILE, find_killer, holds, killers, planted


def _search(name: str) -> tuple[str, list[str] | None]:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return name, find_killer({mutant.key: mutant for mutant in planted()}[name])


SLOW = 0.1
"""Seconds of CPU time."""


@cache
def _times(component: str) -> dict[tuple[str, str], float]:
    """(clause, case) -> seconds of CPU time of the component's last panel, quickest first: the fast cut."""
    panels = [choice for choice in registry.PANELS if choice in registry.choices(component)]
    reference, impl = registry.load(component, panels[0]), registry.load(component, panels[-1])
    found = {}
    for clause in fast_clauses(component):
        for case in clause.cases:
            start = time.process_time()
            clause.run(impl, case, reference)
            found[clause.name, case.name] = time.process_time() - start
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _search_quicker(name: str) -> tuple[str, list[str]]:
    """Half the time is worth another name."""
    mutant = {mutant.key: mutant for mutant in planted()}[name]
    present = killers()[name]
    start = time.process_time()
    holds(mutant, present)
    limit = time.process_time() - start
    if limit > SLOW:
        for case, seconds in _times(mutant.component).items():
            if seconds > limit / 2:
                break
            if not holds(mutant, [*case]):
                return name, [*case]
    return name, present


def find_quicker() -> int:
    """Write the file with quicker cases for bugs whose case is slow."""
    known = {}
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        for name, killer in tqdm(pool.imap(_search_quicker, sorted(killers()), 100), total=len(killers())):
            known[name] = killer
    write(known)
    return 0


def write(known: dict[str, list[str]]) -> None:
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known))
    KILLERS_FILE.write_text(f"{{\n{lines}\n}}\n")


def main(is_all: bool) -> int:
    """Write the file. Returns how many bugs survive."""
    mutants = {mutant.key: mutant for mutant in planted()}
    known = {} if is_all else {name: entry for name, entry in killers().items() if name in mutants}
    if not is_all:
        known = {
            name: entry for name, entry in tqdm(known.items(), "check") if not holds(mutants[name], entry)
        }
    missing = [name for name in mutants if name not in known]
    survivors = []
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        for name, killer in tqdm(pool.imap_unordered(_search, missing), "search", total=len(missing)):
            if killer is None:
                survivors.append(name)
            else:
                known[name] = killer
    write(known)
    for name in survivors:
        print(f"survives: {name}", file=sys.stderr)
    return len(survivors)


if __name__ == "__main__":
    sys.exit(bool(find_quicker() if "--quicker" in sys.argv else main("--all" in sys.argv)))
