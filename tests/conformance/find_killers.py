"""Find, for each planted bug, the clause and case that catch it, and write them to killers.json.

    python -m tests.conformance.find_killers          # bugs without an entry, or whose entry is stale
    python -m tests.conformance.find_killers --all    # all bugs: about 15 minutes on two cores

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

from tqdm import tqdm

from tests.conformance.killers import KILLERS_FILE, find_killer, holds, killers, planted


def _search(name: str) -> tuple[str, list[str] | None]:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return name, find_killer({mutant.key: mutant for mutant in planted()}[name])


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
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known))
    KILLERS_FILE.write_text(f"{{\n{lines}\n}}\n")
    for name in survivors:
        print(f"survives: {name}", file=sys.stderr)
    return len(survivors)


if __name__ == "__main__":
    sys.exit(bool(main("--all" in sys.argv)))
