"""What the stages of a pipeline send each other: hidden states to the next stage, and the sampled tokens from
the last stage to all others.

On GPUs both go over NCCL, each in a group of its own, so that tokens never wait behind hidden states, and on
streams of their own, so that a stage computes one micro-batch while messages of others are on their way.
Every operation is queued behind all that its result depends on, on every rank, so no order of the streams
leads to a deadlock. Log-probabilities, which few requests ask for, follow through the memory of the CPU. On
CPUs everything goes over gloo.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from diptych.optimized.parallel.collectives import NcclCollectives
from diptych.shared.interfaces import Collectives
from diptych.shared.parallel.tensor_frames import pack, unpack

Results = Sequence[torch.Tensor | None]
"""Of a batch, on the CPU: token ids first, then log-probabilities."""

MAX_RESULT_BYTES = 2**30
"""Of the log-probabilities of one batch."""


class Coming(ABC):
    """The results of a batch, which the last stage sends."""

    @abstractmethod
    def arrive(self) -> None:
        """What is queued from now on may read the tokens on the device."""

    @abstractmethod
    def wait(self) -> Results:
        """Wait for the results."""


class StageMessages(ABC):
    """The messages of one rank. Every rank calls `send_*` and `receive_*` in the order of the batches."""

    def __init__(self, ranks: Collectives, device: torch.device) -> None:
        self.ranks: Any = ranks
        self.device = device
        self.last = ranks.size - 1
        self._sent: deque[tuple[torch.Tensor, Any]] = deque()  # on their way: not to be overwritten

    @abstractmethod
    def send_hidden(self, x: torch.Tensor, to: int) -> None:
        """Start sending x [num_tokens, hidden_size], which is not overwritten afterwards."""

    @abstractmethod
    def receive_hidden(self, num_tokens: int, like: torch.Tensor, hidden_size: int) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] from the stage before, for what is queued from now on.
        `like`: a tensor of their dtype and device."""

    @abstractmethod
    def send_tokens(self, results: Results) -> None:
        """On the last stage: start sending the tokens of a batch, whose results are on its device."""

    @abstractmethod
    def send_rest(self, results: Results) -> None:
        """On the last stage: send what `send_tokens` has not sent, once the results are on the CPU."""

    @abstractmethod
    def receive_results(
        self, batch_size: int, has_rest: bool, store: Callable[[torch.Tensor], object]
    ) -> Coming:
        """The results of the next batch. `has_rest`: there are log-probabilities. `store`: called with the
        token ids on the device as soon as they are there."""

    def _send(self, ranks: Any, x: torch.Tensor, to: int) -> None:
        self._sent.append((x, ranks.start_send(x, to)))
        while len(self._sent) > 4 * self.ranks.size:
            self._sent.popleft()[1].wait()  # on a GPU, its stream waits

    def _send_packed(self, results: Results) -> None:
        data = pack(results)
        for rank in range(self.last):
            self._send(self.ranks, torch.tensor([len(data)]), rank)
            self._send(self.ranks, torch.frombuffer(bytearray(data), dtype=torch.uint8), rank)

    def _receive_packed(self) -> Results:
        size = int(self.ranks.receive(torch.zeros(1, dtype=torch.int64), self.last))
        if not 0 < size <= MAX_RESULT_BYTES:
            raise RuntimeError(f"the last rank announces results of {size} bytes")
        data = self.ranks.receive(torch.empty(size, dtype=torch.uint8), self.last)
        return unpack(data.numpy().tobytes())


class HostMessages(StageMessages):
    """Over gloo, between CPUs. A receiver waits."""

    def __init__(self, ranks: Collectives) -> None:
        super().__init__(ranks, torch.device("cpu"))
        self._coming: deque[HostComing] = deque()

    def send_hidden(self, x: torch.Tensor, to: int) -> None:
        self._send(self.ranks, x, to)

    def receive_hidden(self, num_tokens: int, like: torch.Tensor, hidden_size: int) -> torch.Tensor:
        empty = like.new_empty(num_tokens, hidden_size)
        received: torch.Tensor = self.ranks.receive(empty, self.ranks.rank - 1)
        return received

    def send_tokens(self, results: Results) -> None:
        self._send_packed(results)

    def send_rest(self, results: Results) -> None:
        """Everything is sent already."""

    def receive_results(
        self, batch_size: int, has_rest: bool, store: Callable[[torch.Tensor], object]
    ) -> Coming:
        self._coming.append(HostComing(self, store))
        return self._coming[-1]

    def receive_until(self, coming: HostComing) -> None:
        """Receive the results of all batches up to this one: messages come in the order of the batches."""
        while coming.results is None:
            first = self._coming[0]
            first.results = self._receive_packed()
            self._coming.popleft()
            tokens = first.results[0]
            assert tokens is not None
            assert first.store is not None
            first.store(tokens)
            first.store = None  # which refers to the batch, and the batch to its results


class HostComing(Coming):
    def __init__(self, messages: HostMessages, store: Callable[[torch.Tensor], object]) -> None:
        self.messages = messages
        self.store: Callable[[torch.Tensor], object] | None = store
        self.results: Results | None = None

    def arrive(self) -> None:
        self.messages.receive_until(self)

    def wait(self) -> Results:
        self.arrive()
        assert self.results is not None
        return self.results


class DeviceMessages(StageMessages):
    """Over NCCL, between GPUs. Nothing waits on the CPU but `Coming.wait`."""

    def __init__(self, ranks: Collectives, device: torch.device) -> None:
        super().__init__(ranks, device)
        self.hidden: NcclCollectives = self.ranks.beside("hidden states")
        self.tokens: NcclCollectives = self.ranks.beside("tokens")
        self.hidden_stream = torch.cuda.Stream(device)
        self.token_stream = torch.cuda.Stream(device)
        self._connect()

    def _connect(self) -> None:
        """Use each connection once: the first use takes time and memory."""
        rank, x = self.ranks.rank, torch.zeros(1, device=self.device)
        if rank > 0:
            self.hidden.receive(x, rank - 1)
        if rank < self.last:
            self.hidden.send(x, rank + 1)
            self.tokens.receive(x, self.last)
        for other in range(self.last if rank == self.last else 0):
            self.tokens.send(x, other)
        torch.cuda.synchronize(self.device)

    def send_hidden(self, x: torch.Tensor, to: int) -> None:
        self._send(self.hidden, x, to)

    # --8<-- [start:receive-hidden]
    def receive_hidden(self, num_tokens: int, like: torch.Tensor, hidden_size: int) -> torch.Tensor:
        with torch.cuda.stream(self.hidden_stream):
            x = like.new_empty(num_tokens, hidden_size)  # the caller keeps it until the batch is computed
            self.hidden.start_receive(x, self.ranks.rank - 1).wait()  # this stream waits
            received = torch.cuda.Event()
            received.record()
        torch.cuda.current_stream(self.device).wait_event(received)
        return x

    # --8<-- [end:receive-hidden]

    def send_tokens(self, results: Results) -> None:
        assert results[0] is not None
        for rank in range(self.last):
            self._send(self.tokens, results[0], rank)

    def send_rest(self, results: Results) -> None:
        if any(x is not None for x in results[1:]):
            self._send_packed(results)

    def receive_results(
        self, batch_size: int, has_rest: bool, store: Callable[[torch.Tensor], object]
    ) -> Coming:
        with torch.cuda.stream(self.token_stream):
            token_ids = torch.empty(batch_size, dtype=torch.int64, device=self.device)
            self.tokens.start_receive(token_ids, self.last).wait()  # this stream waits
            store(token_ids)
            stored = torch.cuda.Event()
            stored.record()
            on_host = torch.empty(batch_size, dtype=torch.int64, pin_memory=True)
            on_host.copy_(token_ids, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        return DeviceComing(self, stored, copied, on_host, has_rest)


class DeviceComing(Coming):
    def __init__(
        self,
        messages: DeviceMessages,
        stored: torch.cuda.Event,
        copied: torch.cuda.Event,
        on_host: torch.Tensor,
        has_rest: bool,
    ) -> None:
        self.messages = messages
        self.stored = stored
        self.copied = copied
        self.on_host = on_host
        self.has_rest = has_rest

    def arrive(self) -> None:
        torch.cuda.current_stream(self.messages.device).wait_event(self.stored)

    def wait(self) -> Results:
        self.copied.synchronize()
        return self.messages._receive_packed() if self.has_rest else [self.on_host]


def connect(ranks: Collectives, device: torch.device) -> StageMessages:
    """The messages between the devices of all ranks, which call this together."""
    return DeviceMessages(ranks, device) if device.type == "cuda" else HostMessages(ranks)
