"""First code of a worker or standby, once the fork server has made it a process of its own.

Before anything of the user's is imported it says hello and starts the monitor thread. Then it runs the script as
`__main__`; the decorated training function takes over from there.
"""

from __future__ import annotations

import os
import runpy
import sys

from nvrx_sre.core.clock import SystemClock
from nvrx_sre.core.errors import ExitCode, NvrxError
from nvrx_sre.core.output import mask_errors_of_threads, print_error, print_masked, survive_a_full_disk
from nvrx_sre.core.processes import start_ticks
from nvrx_sre.events import messages as wire
from nvrx_sre.events.channel import Channel
from nvrx_sre.events.settings import ChildSettings
from nvrx_sre.restart.control import RankControl, keep_finalizers_quiet
from nvrx_sre.restart.stacks import OwnStacks
from nvrx_sre.session import process
from nvrx_sre.session.environment import OWN_GROUP_HINT, asks_for_torchruns_group, watch_rank_variables


def connect(settings: ChildSettings, channel: Channel, stacks: OwnStacks) -> None:
    """Say hello, make this process one that the launcher knows, and start the monitor thread.

    The thread comes last: what the launcher has sent a standby by now (its node's slots) is handed on by the process.
    """
    clock = SystemClock()
    channel.send(wire.Hello(pid=os.getpid(), start_ticks=start_ticks(os.getpid()), mono_ns=clock.monotonic_ns()))
    control = RankControl(channel, clock, settings.interrupt_signal)
    control.stacks = stacks
    process.set_control(settings, control)
    keep_finalizers_quiet()
    control.install()


def run_user_code(arguments: list[str]) -> None:
    """Run `script.py args` or `-m module args` as `__main__`."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")


def main(arguments: list[str], settings: ChildSettings, channel: Channel, stacks: OwnStacks) -> int:
    """Run `script.py args` or `-m module args`; exit code of the child."""
    survive_a_full_disk()
    mask_errors_of_threads()
    stacks.listen()
    connect(settings, channel, stacks)
    watch_rank_variables()
    try:
        run_user_code(arguments)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print_masked(str(error.code))  # as the interpreter does at its end, which is never reached here
        return 1
    except NvrxError as error:
        print_masked(f"nvrx-sre: {error}")
        return error.exit_code
    except (SyntaxError, ImportError) as error:  # before the first step a user's error, which no restart can cure
        print_error(error)
        return ExitCode.USAGE
    except ValueError as error:
        print_error(error)
        if not asks_for_torchruns_group(error):
            return 1
        print(f"nvrx-sre: {OWN_GROUP_HINT}", file=sys.stderr)
        return ExitCode.USAGE
    except BaseException as error:  # the boundary of the user's code outside the decorated function
        print_error(error)
        return 1
    return 0
