"""The public Python API of Diptych.

    from diptych import LLM

    llm = LLM("tiny-dense")
    print(llm.generate("Count from 3 to 9.", temperature=0, max_tokens=32).text)
    print(llm.chat([{"role": "user", "content": "What is 12 + 30?"}], temperature=0).text)

`LLM` runs a model, `EngineConfig` holds its flags, `SamplingParams` says how tokens are chosen, and
`GenerateOutput` is an answer or a piece of one. A name is imported when it is first used: `import diptych`
takes no time.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diptych.shared.config import EngineConfig as EngineConfig
    from diptych.shared.engine.llm import LLM as LLM
    from diptych.shared.types import GenerateOutput as GenerateOutput
    from diptych.shared.types import SamplingParams as SamplingParams

_HOMES = {
    "LLM": "diptych.shared.engine.llm",
    "SamplingParams": "diptych.shared.types",
    "EngineConfig": "diptych.shared.config",
    "GenerateOutput": "diptych.shared.types",
}

__all__ = ["LLM", "EngineConfig", "GenerateOutput", "SamplingParams", "__version__"]

try:
    __version__ = version("diptych")
except PackageNotFoundError:  # a source tree that was not installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'diptych' has no attribute {name!r}; it has {', '.join(_HOMES)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
