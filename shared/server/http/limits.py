"""Every limit of the HTTP server. docs/security.md says why each exists."""

from __future__ import annotations

import contextlib
import resource

# ---- bodies ----
MAX_BODY_BYTES = 8 * 2**20
MAX_IMAGE_BYTES = 24 * 2**20
"""Of a body in addition, on a server that takes images."""
MAX_MARKS = {
    b",": (2**20, f"{2**20} values"),
    b"[": (2**15, f"{2**15} lists"),
    b"{": (2**15, f"{2**15} objects"),
    b":": (2**16, f"{2**16} names"),
}
"""Of a body, outside of its texts. A list, an object or a name costs far more than a number does."""
MAX_OBJECTS = 8192
"""Objects in one list of a body: messages, parts, tools."""
MAX_NAMES = 16_384
"""Names in one object of a body that takes any: biases, metadata."""
INLINE_BYTES = 16 * 2**10
"""A longer body is parsed and validated in a thread, which takes milliseconds."""
ONE_CALL_BYTES = 512 * 2**10
ONE_CALL_MARKS = {b",": 2**16, b"[": 2**10, b"{": 2**10}
"""Of a body, texts included, that one call parses: 2**16 token ids take 4 ms; numbers of 4,000 digits, which
take the square of their length, 20 ms."""
MAX_DISCARDED = 4
"""Times the longest body: so much of a body that is too long is read and discarded."""

# ---- fields ----
MAX_ID_CHARS = 128
"""Ids and names of a client's that answers repeat."""
MAX_KEY_CHARS = 512
"""Texts that the scheduler compares: namespaces of the cache, keys of routing."""
MAX_PRIORITY = 1000

# ---- errors ----
MAX_MESSAGE_CHARS = 500
MAX_FIELD_CHARS = 200

# ---- connections ----
HEADER_SECONDS = 15.0
"""From the opening of a connection, or the first byte of a later request, until its headers are there."""
BODY_SECONDS = 120.0
"""For a body to arrive."""
WRITE_SECONDS = 60.0
"""For a client to read, once the buffer of its connection is full."""
WANTED_FILES = 65_536
"""Open files that the server asks the system for: each connection is one."""
MAX_CONNECTIONS = 16_384


def raise_file_limit() -> int:
    """Let this process open WANTED_FILES files, or as many as the system lets it; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return WANTED_FILES if soft == resource.RLIM_INFINITY else soft
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
