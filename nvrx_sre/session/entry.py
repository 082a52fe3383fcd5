"""`resilient`: turn a training function into one that a launcher can interrupt and call again.

Under a launcher the decorated call never returns normally while the run goes on: it parks, takes a rank, runs
generation after generation, and leaves when the launcher says so. Code after the call runs at the end of
the run. Without a launcher the function is called once with an `UnmanagedContext`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from nvrx_sre.core import processes
from nvrx_sre.core.errors import RestartAborted, UserError
from nvrx_sre.events import messages as wire
from nvrx_sre.session.context import Context
from nvrx_sre.session.environment import (
    own_device_index,
    rank_variable_read,
    set_rank_variables,
    stop_watching_rank_variables,
)
from nvrx_sre.session.process import RankProcess, current
from nvrx_sre.session.unmanaged import UnmanagedContext
from nvrx_sre.telemetry import context as ambient

P = ParamSpec("P")
R = TypeVar("R")


def resilient(function: Callable[Concatenate[Context, P], R]) -> Callable[P, R | None]:
    """Decorate `function(ctx, ...)`; the result is called without the context.

    The function must keep its state in what it tracks: it is called again, in the same process, for every
    generation. Must be called from the main thread under a launcher (`UserError` otherwise), since only
    the main thread can be interrupted.
    """

    @functools.wraps(function)
    def entry(*args: P.args, **kwargs: P.kwargs) -> R | None:
        process = current()
        if process is None:
            context: Any = UnmanagedContext()
            result = function(context, *args, **kwargs)
            context.close()
            return result
        if threading.current_thread() is not threading.main_thread():
            raise UserError("a resilient training function must be called from the main thread")
        _run_managed(process, _bind(function, args, kwargs))
        return None

    return entry


def _bind(function: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Context], R]:
    return lambda context: function(context, *args, **kwargs)


def _run_managed(process: RankProcess, function: Callable[[Context], Any]) -> None:
    from nvrx_sre.checkpoint.spare import Spare
    from nvrx_sre.restart.abort import ProcessGroups
    from nvrx_sre.restart.wrapper import GenerationBody, Restarter
    from nvrx_sre.session import restoring  # DCP's imports belong before parking
    from nvrx_sre.session.rehearsal import rehearse_newest
    from nvrx_sre.session.warm import warm_up

    read = rank_variable_read()
    stop_watching_rank_variables()
    restarter, spare = Restarter(process.control, ProcessGroups()), Spare()
    warm_up(restarter.groups, own_device_index())
    try:
        assign = _park(process, read, lambda wanted: rehearse_newest(restarter.groups, process, wanted))
    except RestartAborted:
        return
    spare.fetch_ahead(process.slots)
    ambient.bind(run=process.settings.run, rank=assign.rank)

    def body_for(go: wire.Go) -> GenerationBody:
        nonlocal assign
        assign = _newest_assign(process, assign)
        traceparent = ambient.set_generation(go.generation)
        set_rank_variables(assign, go, traceparent)
        context = Context(process, assign, go, restarter, spare)
        restoring.fetch_ahead(process, go, context.device)
        return GenerationBody(
            function=lambda: context.run(function), result=lambda: context.result, discard=context.discard
        )

    try:
        restarter.run(assign.generation, body_for)
    except RestartAborted:
        return


def _park(process: RankProcess, read: str, rehearse: Callable[[wire.Rehearse], None]) -> wire.Assign:
    """Say that this process can become a rank, and wait until it does; meanwhile it rehearses what it is asked to.

    `read`: rank variable the script has read.
    """
    process.settle_slots()  # a standby that still maps is none
    process.control.send(
        wire.Parked(
            fit=not read,
            note=f"the script reads {read} before the resilient call, so it cannot be a standby" if read else "",
            mono_ns=process.control.clock.monotonic_ns(),
        )
    )
    while (wanted := process.control.wait_called()) is not None:
        rehearse(wanted)
    assign, descriptor = process.control.wait_assigned()
    _become(process, assign, descriptor)
    return assign


def _become(process: RankProcess, assign: wire.Assign, descriptor: int | None) -> None:
    """This process is that rank now."""
    processes.set_name(f"nvrx-rank-{assign.rank:05d}")
    process.take_slots(assign, descriptor)


def _newest_assign(process: RankProcess, assign: wire.Assign) -> wire.Assign:
    """`assign`, or the one that came since: another world, in which this process is another rank without slots yet."""
    newest, descriptor = process.control.wait_assigned()
    if newest is not assign:
        _become(process, newest, descriptor)
        ambient.bind(run=process.settings.run, rank=newest.rank)
    return newest
