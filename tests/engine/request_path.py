"""Which code one request touches in the reference panel: the length of the path that a reader has to follow.

python -m tests.engine.request_path            # two lines: to start an engine, and to answer one request
python -m tests.engine.request_path --list     # each function, in the order of its first call
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "Count from 3 to 9."


class Function(NamedTuple):
    file: str
    name: str
    num_lines: int  # from `def` or its decorator to its last statement


class CodePath(NamedTuple):
    """The functions of this project that ran, each once, in the order of the first call.

    Lambdas, comprehensions and the methods that `dataclass` makes are part of what calls them. Code that runs
    while a module is imported does not count."""

    functions: list[Function]

    @property
    def files(self) -> set[str]:
        return {function.file for function in self.functions}

    @property
    def num_lines(self) -> int:
        return sum(function.num_lines for function in self.functions)

    @property
    def share_of_reference(self) -> float:
        """The share of the lines that stands in reference/."""
        lines = [each.num_lines for each in self.functions if each.file.startswith("reference/")]
        return sum(lines) / self.num_lines

    def __str__(self) -> str:
        return (
            f"{len(self.files)} files, {len(self.functions)} functions, {self.num_lines:,} lines, "
            f"{self.share_of_reference:.0%} of them in reference/"
        )


def paths() -> dict[str, CodePath]:
    """ "start": from the flags of an engine to an engine that can answer. "request": from a
    prompt to its text."""
    from diptych.shared.engine.llm import LLM

    flags: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_total_tokens": 1024}
    llms: list[LLM] = []
    start = recorded(lambda: llms.append(LLM("tiny-dense", panel="reference", **flags)))
    answer = recorded(lambda: llms[0].generate(PROMPT, temperature=0, max_tokens=8, progress=False))
    return {"start": start, "request": answer}


def recorded(run: Callable[[], Any]) -> CodePath:
    seen: dict[CodeType, None] = {}
    num_imports = 0  # that are under way

    def record(frame: FrameType, event: str, _: object) -> None:
        nonlocal num_imports
        code = frame.f_code
        if code.co_filename == "<frozen importlib._bootstrap>" and code.co_name == "_find_and_load":
            num_imports += {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and num_imports == 0:
            seen.setdefault(code)

    sys.setprofile(record)
    try:
        run()
    finally:
        sys.setprofile(None)
    found: dict[tuple[str, str], Function] = {}
    for code in seen:
        file = Path(code.co_filename).resolve()  # the folders of the package are links
        name = getattr(code, "co_qualname", code.co_name)
        is_ours = file.is_relative_to(ROOT) and ".venv" not in file.parts and file.is_file()
        if is_ours and file != Path(__file__).resolve() and not code.co_name.startswith("<"):
            last = max(line for _, _, line in code.co_lines() if line is not None)
            path = file.relative_to(ROOT).as_posix()
            found.setdefault((path, name), Function(path, name, last - code.co_firstlineno + 1))
    return CodePath(list(found.values()))


def main() -> None:
    for name, path in paths().items():
        if "--list" in sys.argv:
            for function in path.functions:
                print(f"{function.file:50} {function.num_lines:4} {function.name}")
        print(f"{name:8} {path}")


if __name__ == "__main__":
    main()
