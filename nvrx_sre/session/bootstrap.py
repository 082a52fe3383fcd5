"""First code of a worker or standby: `python -m nvrx_sre.session.bootstrap script.py args | -m module args`.

Before anything of the user's is imported it binds its life to the launcher's (parent-death signal, then a check
that the parent is still the launcher, so that there is no window), says hello and starts the monitor
thread. Then it runs the script as `__main__`; the decorated training function takes over from there.

Standard library only until the script imports more.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import runpy
import signal
import socket
import sys
import traceback

from nvrx_sre.core.clock import SystemClock
from nvrx_sre.core.errors import ExitCode, NvrxError
from nvrx_sre.core.output import survive_a_full_disk
from nvrx_sre.core.processes import start_ticks
from nvrx_sre.events import channel as wire
from nvrx_sre.events.settings import STACKS_SIGNAL, ChildSettings
from nvrx_sre.restart.control import RankControl
from nvrx_sre.session import process
from nvrx_sre.session.environment import read_settings, watch_rank_variables
from nvrx_sre.session.heap import keep_freed_memory

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


def bind_to_parent(launcher_pid: int) -> None:
    """Die with the launcher. Exits at once if it is already gone."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher_pid:
        os._exit(ExitCode.RETRYABLE)


def open_channel() -> wire.Channel:
    """The child's end of the channel. The descriptor is closed on exec, so grandchildren do not hold it."""
    descriptor = int(os.environ.pop(wire.CHANNEL_FD_VARIABLE))
    os.set_inheritable(descriptor, False)
    return wire.Channel(socket.socket(fileno=descriptor))


def connect(settings: ChildSettings) -> RankControl:
    """Say hello and start the monitor thread."""
    clock = SystemClock()
    channel = open_channel()
    channel.send(wire.Hello(pid=os.getpid(), start_ticks=start_ticks(os.getpid()), mono_ns=clock.monotonic_ns()))
    control = RankControl(channel, clock, settings.interrupt_signal)
    control.install()
    return control


def run_user_code(arguments: list[str]) -> None:
    """Run `script.py args` or `-m module args` as `__main__`."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")


def main(arguments: list[str]) -> int:
    """Exit code of the child."""
    settings = read_settings()
    if settings is None or not arguments:
        print("nvrx-sre: this module is started by the launcher; use `nvrx-sre launch`", file=sys.stderr)
        return ExitCode.USAGE
    bind_to_parent(settings.launcher_pid)
    survive_a_full_disk()
    keep_freed_memory()
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    process.set_control(settings, connect(settings))
    watch_rank_variables()
    try:
        run_user_code(arguments)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else (0 if error.code is None else 1)
    except NvrxError as error:
        print(f"nvrx-sre: {error}", file=sys.stderr)
        return error.exit_code
    except (SyntaxError, ImportError):  # before the first step a user's error, which no restart can cure
        traceback.print_exc()
        return ExitCode.USAGE
    except BaseException:  # the boundary of the user's code outside the decorated function
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Not a normal exit: torch's teardown takes seconds and may block on a group that no longer exists.
    os._exit(code)
