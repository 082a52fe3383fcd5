"""Standard output and error of a child whose log lies on the run's storage, which may be full; and what it says there.

A line that the disk does not take is lost; it must not become an exception in the code that wanted to say
something, of which most is the user's. Installed once, before anything is printed; forked children inherit it.
What the package itself prints of an error, texts of the user's code among it, is masked first; what that code prints is
not ours. Must not: buffer (a SIGKILL would take the last lines along).
"""

from __future__ import annotations

import io
import os
import sys
import threading
import traceback
from typing import Any

from nvrx_sre.core.masking import TextRedactor


class LossyFile(io.FileIO):
    """A descriptor that says of everything that it was written."""

    def write(self, content: Any, /) -> int:
        """Number of bytes in `content`, whatever became of them."""
        size_bytes = memoryview(content).nbytes
        try:
            super().write(content)
        except OSError:
            return size_bytes
        return size_bytes


def survive_a_full_disk() -> None:
    """From now on `print` and tracebacks of this process lose what the disk refuses, and raise nothing for it."""
    sys.stdout = _lossy(sys.stdout)
    sys.stderr = _lossy(sys.stderr)


def _lossy(stream: Any) -> io.TextIOWrapper:
    stream.flush()
    file = LossyFile(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(file, encoding=stream.encoding, errors=stream.errors, write_through=True)


def masked(text: str) -> str:
    """`text` without secrets: those that the environment has now, and what has the form of one."""
    return TextRedactor.from_environment(os.environ).text(text)


def print_masked(text: str) -> None:
    """`text`, masked, and a line's end to stderr at once."""
    sys.stderr.write(f"{masked(text)}\n")
    sys.stderr.flush()


def print_error(error: BaseException) -> None:
    """The traceback of `error` to stderr as the interpreter shows it, causes and notes included, but masked."""
    print_masked("".join(traceback.format_exception(error)).rstrip("\n"))


def mask_errors_of_threads() -> None:
    """From now on the traceback of an error that ends a thread is masked as well."""
    threading.excepthook = _thread_ended


def _thread_ended(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_value is None or isinstance(ended.exc_value, SystemExit):
        return
    name = "unknown" if ended.thread is None else ended.thread.name
    trace = "".join(traceback.format_exception(ended.exc_value)).rstrip("\n")
    print_masked(f"Exception in thread {name}:\n{trace}")
