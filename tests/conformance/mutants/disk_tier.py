"""Planted bugs in a disk tier: lengths, names, order, digests, permissions, waiting."""

from __future__ import annotations

from tests.conformance.mutants.mutant import bugs_in

FILES = "shared.scheduling.page_files"
TIER = "tiers.disk_tier"

bug = bugs_in("disk_tier", "optimized.tiers.disk_tier:DiskTier", folder="optimized.")
bug(
    "OneSystemCall",
    "Views beyond one system call are not written.",
    (TIER, "while first < len(views):\n        num", "if first < len(views):\n        num"),
)
bug("ReadsAreNoUse", "A page that is read stays as old as it was.", (TIER, "self.files.use(key)", "pass"))
bug(
    "AnyBytes",
    "The digest of what was read is not compared.",
    (TIER, "or digest != digest_of", "and digest_of"),
)
bug(
    "WritesEarly", "A page is written before it has arrived.", (TIER, "memory.wait()\n        views", "views")
)
bug("OpenToOthers", "Others may read the files.", (FILES, "0o600", "0o644"))

bug = bugs_in("disk_tier", "reference.tiers.disk_tier:DiskTier", folder="reference.")
bug("FindsBehindGaps", "Pages behind a gap count.", (TIER, "takewhile(self", "filter(self"))
bug("OldestFirst", "The pages that were written first leave.", (FILES, "self._used.move_to_end(key)", "pass"))
bug(
    "AnyKey",
    "The digest of a page leaves its key out.",
    (FILES, "hashlib.sha256(key.encode())", "hashlib.sha256()"),
)
bug(
    "DiskErrorsRaise",
    "A disk that fails raises an error.",
    (TIER, "except OSError", "except FileExistsError"),
)
WAIT, PUT = "        memory.wait()\n", "        put(data, memory.views)\n"
bug("ReadsEarly", "A page is read while copies use it.", (TIER, WAIT + PUT, PUT + WAIT))
