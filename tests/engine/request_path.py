"""Which code one request touches in the reference panel: the length of the path that a reader has to follow.

python -m tests.engine.request_path            # two numbers: files and functions
python -m tests.engine.request_path --list     # each function, in the order of its first call
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "Count from 3 to 9."


def functions_of_a_request() -> list[tuple[str, str]]:
    """(file, function) of this project, each once, in the order of the first call, from a prompt to its text.

    Lambdas, comprehensions and the methods that `dataclass` makes are part of what calls them."""
    from diptych.shared.engine.llm import LLM

    llm = LLM("tiny-dense", panel="reference", device="cpu", dtype="float32", max_total_tokens=1024)
    seen: dict[CodeType, None] = {}

    def record(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.setdefault(frame.f_code)

    sys.setprofile(record)
    try:
        llm.generate(PROMPT, temperature=0, max_tokens=8, progress=False)
    finally:
        sys.setprofile(None)
    path = []
    for code in seen:
        if not code.co_filename.startswith("/"):  # frozen modules, and code made at run time
            continue
        file = Path(code.co_filename).resolve()  # through the links of diptych/
        if file.is_relative_to(ROOT) and ".venv" not in file.parts and not code.co_name.startswith("<"):
            path.append((file.relative_to(ROOT).as_posix(), getattr(code, "co_qualname", code.co_name)))
    return list(dict.fromkeys(path))


def main() -> None:
    path = functions_of_a_request()
    if "--list" in sys.argv:
        for file, function in path:
            print(f"{file:50} {function}")
    print(f"{len({file for file, _ in path})} files, {len(path)} functions")


if __name__ == "__main__":
    main()
