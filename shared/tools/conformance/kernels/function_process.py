"""The process of the function under check. It gets inputs, never an expected value, and no clock counts that
it could change. Requests are pickles from the check; answers are JSON, because what runs here is not
trusted."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import pickle
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from diptych.shared.tools.conformance.kernels.arena import ALIGNMENT, RESULTS, SIZE, Arena, Place
from diptych.shared.tools.conformance.kernels.gpu_memory import Handle, opened
from diptych.shared.tools.conformance.kernels.triton_interpreter import round_in_interpreter
from diptych.shared.tools.conformance.kernels.watched_call import Watch, copied, invoke

_read, _write, _exit, _getpid, _dumps = os.read, os.write, os._exit, os.getpid, json.dumps
_synchronize, _copy = torch.cuda.synchronize, torch.Tensor.copy_
PID = _getpid()


class Child:
    def __init__(self, requests: int, answers: int, arena: int) -> None:
        self.requests, self.answers = requests, answers
        self.arena = Arena(arena)
        self.watch = Watch()
        self.watch.add(Child, Watch)
        self.function: Callable[..., Any] = print
        self.device, self.memory = torch.device("cpu"), 0
        self.tensors: dict[Place, torch.Tensor] = {}
        self.raw: dict[int, torch.Tensor] = {}  # on a GPU: offset -> the copy of this storage
        self.handle: Handle | None = None
        self.shared: torch.UntypedStorage | None = None  # memory of a GPU that the check has
        self.is_shared = False
        self.sets: list[tuple[Any, Any]] = []
        self.outputs: list[Any] = []
        self.end_of_results = RESULTS

    def serve(self) -> None:
        while True:
            size = struct.unpack("<Q", self._receive(8))[0]
            request = pickle.loads(self._receive(size))
            answer = self._answer(request)
            if _getpid() != PID:  # a fork came back from the function
                _exit(0)
            text = _dumps(answer).encode()
            _write_all(self.answers, struct.pack("<Q", len(text)) + text)

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = _read(self.requests, size - len(data))
            if not part:
                _exit(0)
            data += part
        return data

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return getattr(self, f"do_{request.pop('do')}")(**request)
        except (ValueError, NotImplementedError) as error:
            return {"refusal": f"{error}" or type(error).__name__}
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            frames = traceback.extract_tb(error.__traceback__)
            text = f"{type(error).__name__}: {error}"[:2000]
            if self.memory and (isinstance(error, MemoryError) or "can't allocate memory" in text):
                text = f"MemoryError: it needs more than {self.memory / 2**30:.1f} GiB, half of what is free"
            return {"error": text,
                    "place": f"{frames[-1].filename}:{frames[-1].lineno}"}  # fmt: skip

    def do_start(
        self, target: str, paths: list[str], device: str, threads: int, memory: int
    ) -> dict[str, Any]:
        sys.path[:] = paths
        torch.set_num_threads(threads)
        self.device = torch.device(device)
        self.memory = memory
        if memory:
            with contextlib.suppress(ImportError, ValueError, OSError):
                resource: Any = importlib.import_module("resource")
                resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        if self.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(0.5)
        from diptych.shared.tools.conformance.kernels.target import load_function

        self.function = load_function(target)
        round_in_interpreter()
        return {"wrong": self.watch.replaced()}

    def do_bind(self, args: Any, kwargs: Any) -> dict[str, Any]:
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):  # of a builtin: not known
            return {}
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            return {"signature": str(signature), "why": str(error)}
        return {}

    def do_call(self, args: Any, kwargs: Any, is_same: bool) -> dict[str, Any]:
        if not is_same:
            self.tensors, self.raw, self.is_shared = {}, {}, False
        for offset, raw in self.raw.items():
            raw.copy_(self.arena.bytes_at(offset, raw.numel()))
        arguments = self._made(args), self._made(kwargs)
        round_in_interpreter()  # a function may import it late
        returned, wrong = invoke(self.watch, self.function, *arguments)
        self.end_of_results = RESULTS
        answer = {"value": self._sent(returned), "wrong": wrong}
        for offset, raw in self.raw.items():
            self.arena.bytes_at(offset, raw.numel()).copy_(raw)
        return answer

    def do_prepare(self, sets: list[tuple[Any, Any]], handle: Handle | None) -> dict[str, Any]:
        """`handle`: of the inputs' memory on a GPU; None: they are copied, or on the CPU."""
        self.tensors, self.raw, self.outputs = {}, {}, []
        self.is_shared = handle is not None
        if handle is not None and handle != self.handle:
            self.shared, self.handle = opened(handle), handle
        self.sets = [(self._made(args), self._made(kwargs)) for args, kwargs in sets]
        if self.device.type == "cuda":
            _synchronize()
        return {}

    def do_pass(self) -> dict[str, Any]:
        """Calls the function on each prepared set. The check measures the time until the answer."""
        outputs, function = [], self.function
        with torch.inference_mode(), self.watch.counted_threads():
            for args, kwargs in self.sets:
                outputs.append(function(*args, **kwargs))
        if self.device.type == "cuda":
            _synchronize()
        self.watch.join()
        self.outputs = outputs
        return {}

    def do_output(self, index: int) -> dict[str, Any]:
        wrong: list[str] = []
        returned = copied(self.outputs[index], wrong, []) if self.outputs else None
        self.end_of_results = RESULTS
        for offset, raw in self.raw.items():
            self.arena.bytes_at(offset, raw.numel()).copy_(raw)
        return {"value": self._sent(returned), "wrong": wrong + self.watch.replaced()}

    def do_operators(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """The names of torch's operators in one call, and on a GPU those of its kernels."""
        from diptych.shared.tools.conformance.kernels.operators import operators_of

        self.tensors, self.raw, self.is_shared = {}, {}, False
        arguments = self._made(args), self._made(kwargs)
        return {"names": operators_of(lambda: self.function(*arguments[0], **arguments[1]))}

    def _made(self, value: Any) -> Any:
        """Arguments with tensors in place of `Place`s: on the CPU in shared memory, on a GPU in copies that
        keep their addresses until the next call with new memory."""
        if isinstance(value, Place):
            return self._tensor(value)
        if isinstance(value, (tuple, list)):
            return type(value)(self._made(each) for each in value)
        if isinstance(value, dict):
            return {name: self._made(each) for name, each in value.items()}
        return value

    def _tensor(self, place: Place) -> torch.Tensor:
        if place in self.tensors:
            return self.tensors[place]
        start, view = place.storage_offset, (place.shape, place.stride)
        if self.is_shared:
            assert self.shared is not None
            start += place.offset // place.dtype.itemsize
            empty = torch.empty(0, dtype=place.dtype, device=self.device)
            self.tensors[place] = empty.set_(self.shared, start, *view)
        else:
            raw = self.raw.get(place.offset)
            if raw is None:
                raw = self.arena.bytes_at(place.offset, place.num_bytes)
                if self.device.type != "cpu":
                    raw = self.raw[place.offset] = raw.to(self.device)
            empty = torch.empty(0, dtype=place.dtype, device=raw.device)
            self.tensors[place] = empty.set_(raw.untyped_storage(), start, *view)
        return self.tensors[place]

    def _sent(self, value: Any) -> Any:
        """What is returned as JSON; the elements of tensors are written to the arena."""
        if isinstance(value, tuple):
            return {"tuple": [self._sent(each) for each in value]}
        if not isinstance(value, torch.Tensor):
            return {"other": type(value).__name__}
        num_bytes = value.numel() * value.element_size()
        offset = self.end_of_results
        self.end_of_results += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if self.end_of_results > SIZE:
            raise MemoryError(f"results of more than {(SIZE - RESULTS) // 2**30} GiB")
        if num_bytes:
            flat = value.contiguous().view(-1).view(torch.uint8)
            _copy(self.arena.bytes_at(offset, num_bytes), flat)
        dtype, shape = str(value.dtype).removeprefix("torch."), list(value.shape)
        return {"offset": offset, "dtype": dtype, "shape": shape, "device": str(value.device)}


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[_write(file, data) :]


def main() -> None:
    Child(*(int(each) for each in sys.argv[1:4])).serve()


if __name__ == "__main__":
    main()
