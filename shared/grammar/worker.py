"""The process that compiles grammars: `python -m diptych.shared.grammar.worker`.

A compiler in C++ can run for ever, exhaust memory or overflow its stack, and a thread cannot be killed. This
process can. It talks in frames over stdin and stdout: four bytes of length, then UTF-8. The first frame in is
xgrammar's tokenizer info, and the first frame out says that it was read. Each further frame in is a JSON list
[kind, text, seconds of CPU time]. The frame out is "=" and the serialized grammar, or "!" and what is wrong
with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import struct
import sys
from typing import Any, BinaryIO

from diptych.shared.grammar.schema_gate import gate, gate_tag
from diptych.shared.grammar.schema_regex import whole_match

MAX_FRAME_BYTES = 256 * 2**20
MAX_MEMORY_BYTES = 8 * 2**30
"""Of the process, without the files that it maps."""
JSON_OBJECT = '{"type": "object", "additionalProperties": true}'


def read_frame(stream: BinaryIO) -> str | None:
    """None at the end of the stream."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    (num_bytes,) = struct.unpack("<I", head)
    if num_bytes > MAX_FRAME_BYTES:
        return None
    data = stream.read(num_bytes)
    return data.decode() if len(data) == num_bytes else None


def write_frame(stream: BinaryIO, text: str) -> None:
    data = text.encode()
    stream.write(struct.pack("<I", len(data)) + data)
    stream.flush()


def compile_spec(compiler: Any, kind: str, text: str) -> Any:
    """Raises `ValueError` for a grammar that cannot be enforced, or an exception of xgrammar's."""
    if kind == "json_object":
        kind, text = "json_schema", JSON_OBJECT
    if kind == "json_schema":
        text = json.dumps(gate(json.loads(text)))
        # No free whitespace: a model could write blanks until it has reached its greatest length.
        return compiler.compile_json_schema(text, any_whitespace=False)
    if kind == "structural_tag":
        text = json.dumps(gate_tag(json.loads(text)))
    if kind == "regex":
        text = whole_match(text)
    compile_kind = {
        "regex": compiler.compile_regex,
        "ebnf": compiler.compile_grammar,
        "structural_tag": compiler.compile_structural_tag,
    }
    return compile_kind[kind](text)


def try_out(grammar: Any, vocab_size: int) -> None:
    """The first mask: a grammar whose masks never end must not reach the engine."""
    import torch
    import xgrammar

    matcher = xgrammar.GrammarMatcher(grammar)
    matcher.fill_next_token_bitmask(torch.zeros(1, -(-vocab_size // 32), dtype=torch.int32), 0)


def first_line(error: BaseException) -> str:
    """xgrammar's message without the place in its sources."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", line)[:300]


def main() -> None:
    """Serve until stdin ends, which it does with the process that started this one."""
    frames_in, frames_out = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no frame
    _limit_memory()
    import xgrammar

    info_text = read_frame(frames_in)
    if info_text is None:
        return
    info = xgrammar.TokenizerInfo.deserialize_json(info_text)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    write_frame(frames_out, "ready")
    while (frame := read_frame(frames_in)) is not None:
        kind, text, seconds = json.loads(frame)
        # The default action of SIGPROF ends the process, also when its parent is gone.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            grammar = compile_spec(compiler, kind, text)
            try_out(grammar, info.vocab_size)
            answer = f"={grammar.serialize_json()}"
        except Exception as error:
            answer = f"!{first_line(error)}"
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(frames_out, answer)


def _limit_memory() -> None:
    """Where the system can; a compiler that asks for more fails instead of the engine beside it."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))


if __name__ == "__main__":
    main()
