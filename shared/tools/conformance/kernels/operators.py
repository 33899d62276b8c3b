"""The operators of torch, and on a GPU the kernels, that a function calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        self.names[name] = self.names.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def operators_of(call: Callable[[], object]) -> list[str]:
    """Names in the order of their first use."""
    recorder = _Recorder()
    with torch.no_grad(), recorder:
        call()
    names = list(recorder.names)
    if torch.cuda.is_available():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        events = profile.events() or []
        names += dict.fromkeys(each.name for each in events if each.device_type.name == "CUDA")
    return names[:40]
