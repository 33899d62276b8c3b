"""A replica in a thread of this process, called like one in another process."""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
import weakref
from collections.abc import Callable

from diptych.shared.engine.processes.child import Child, EngineProcessEnded, Inbox, InboxClosed
from diptych.shared.parallel import channel
from diptych.shared.parallel.channel import Channel

END_SECONDS = 1.0
"""Time limit for the step that runs when the thread is ended: at the end of the interpreter it should not be
in the middle of a call of the device."""


class ChildThread(Child):
    """A handle of the thread. The thread ends when this object is deleted or ended; not in a step."""

    def __init__(self, name: str, serve: Callable[[Inbox], None]) -> None:
        """Start the thread. `serve` makes the inbox's calls; it should have no reference to this object."""
        mine, theirs = channel.pair()
        super().__init__(name, mine)
        inbox = Inbox(theirs, list, leave=lambda code: inbox.close())
        thread = threading.Thread(target=_run, args=(serve, inbox), name=name, daemon=True)
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _end, mine, thread)
        inbox.listen()
        thread.start()

    def describe_end(self) -> str:
        return f"{self.name} has ended"


def _run(serve: Callable[[Inbox], None], inbox: Inbox) -> None:
    try:
        with contextlib.suppress(InboxClosed):
            serve(inbox)
    except Exception as error:
        problem = str(error)
        if not isinstance(error, EngineProcessEnded):
            traceback.print_exc()
            last = traceback.extract_tb(error.__traceback__)[-1]
            problem = f"{type(error).__name__}: {error} ({os.path.basename(last.filename)}:{last.lineno})"
        with contextlib.suppress(OSError):  # the other end may be closed
            inbox.send(inbox.report(problem))


def _end(pipe: Channel, thread: threading.Thread) -> None:
    pipe.close()
    if thread is not threading.current_thread():  # which may have collected the handle
        thread.join(END_SECONDS)
