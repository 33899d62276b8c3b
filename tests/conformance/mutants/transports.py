"""Planted bugs in transports: rooms that end too early, too late, or with the wrong pages."""

from __future__ import annotations

import socket

from diptych.reference.parallel.shared_memory_transport import SharedMemoryTransport
from diptych.reference.parallel.transport import Frame, Transport
from tests.conformance.mutants.mutant import bugs_in, mutant_of


@mutant_of("transport")
class FreedInFlight(SharedMemoryTransport):
    """A receiver's room fails at `abort`: its pages are freed while the sender writes them."""

    def abort(self, room):
        super().abort(room)
        if room in self._rooms and not self._rooms[room].is_sender:
            self._end(room, "failed")


@mutant_of("transport")
class SenderLeavesInFlight(Transport):
    """A sender's room fails when `abort` arrives, while its writer reads the pages."""

    def _abort_sender(self, room):
        super()._abort_sender(room)
        self._end(room, "failed")


@mutant_of("transport")
class DoneWhenSent(Transport):
    """A sender's room is done when the pages are in the queue."""

    def send(self, room, *sent):
        super().send(room, *sent)
        self._end(room, "done")


@mutant_of("transport")
class SourcePagesAreTargets(Transport):
    """Pages arrive at the numbers that they have at the sender."""

    def send(self, room, source_pages, target_pages, *rows):
        super().send(room, source_pages, source_pages, *rows)


@mutant_of("transport")
class SourceRowIsTarget(Transport):
    """The state arrives in the row that it has at the sender."""

    def open_receiver(self, room, pages, row=None):
        super().open_receiver(room, pages, row)
        self._rooms[room].rows += range(5)

    def send(self, room, source_pages, target_pages, source_row=None, target_row=None):
        super().send(room, source_pages, target_pages, source_row, source_row)


@mutant_of("transport")
class OneLayerShort(Transport):
    """The last layer is not sent."""

    def _copy(self, room, layer, source, target):
        if layer < self.kv_pool.num_layers - 1:
            super()._copy(room, layer, source, target)


@mutant_of("transport")
class KForV(Transport):
    """V is stored as K."""

    def _store(self, frame, payload):
        half = len(payload) // 2
        super()._store(frame, payload[half:] + payload[:half])


@mutant_of("transport")
class LossIsNotNoticed(Transport):
    """Rooms stay open when the connection is lost."""

    def _end(self, room, status):
        if not self.is_lost:
            super()._end(room, status)

    def _read(self):
        try:
            while True:
                self._apply(*self._take_frame())
        except (OSError, EOFError):
            self.is_lost = True
            self._outgoing.put(None)


@mutant_of("transport")
class ClosesInFlight(SharedMemoryTransport):
    """The connection ends before the writer does."""

    def close(self):
        self.connection.shutdown(socket.SHUT_RDWR)
        super().close()


@mutant_of("transport")
class AnyPages(Transport):
    """Shape and dtype of the other pool are not compared."""

    def _greet(self):
        self._put_frame(Frame("hello"))
        self._take_frame()


@mutant_of("transport")
class AbortsWhatIsDone(Transport):
    """An abort stays known after its room has ended, and hits the next room of the name."""

    def abort(self, room):
        super().abort(room)
        self._early_aborts.add(room)


bug = bugs_in("transport", "reference.parallel.transport:Transport", folder="reference.parallel.")
# fmt: off
bug("NewestMessageFirst", "Messages are given newest first.",
    ("transport", "found, self._messages = self._messages, []",
     "found, self._messages = self._messages[::-1], []"))
