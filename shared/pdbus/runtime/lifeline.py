"""The lifeline: a pipe whose other end the launcher holds. It breaks when the launcher dies, however it dies.

The kernel closes the launcher's end also after SIGKILL, so a process that watches its own end never outlives the
launcher by more than a grace period. It is watched by a thread, so that it works while the event loop is busy or stuck.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

GRACE_S = 5.0
"""From the loss of the launcher to the end of the process, whatever it is doing."""


@contextmanager
def lifeline(fd: int | None, on_loss: Callable[[], None], grace_s: float = GRACE_S) -> Iterator[None]:
    """Calls `on_loss` from a thread when the pipe `fd` breaks; ends the process by force `grace_s` later.

    With `fd` None nobody is watched."""
    if fd is None:
        yield
        return
    wake_read, wake_write = os.pipe()
    lost = threading.Event()

    def watch() -> None:
        readable, _, _ = select.select([fd, wake_read], [], [])
        if wake_read in readable:
            return
        lost.set()
        on_loss()
        threading.Event().wait(grace_s)  # not ended by leaving the scope: the interpreter's own exit may hang too
        os._exit(1)

    thread = threading.Thread(target=watch, name="lifeline", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.write(wake_write, b"x")
        # Joined only where it can end: after a loss it stays to see the process out.
        while thread.is_alive() and not lost.is_set():
            thread.join(timeout=0.2)
        os.close(wake_write)
        if not thread.is_alive():
            os.close(wake_read)
