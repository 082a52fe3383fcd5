"""What trains the tracked state and is not tracked itself: a recovery would begin it anew, and still look like one.

    optimizer   steps over parameters of a tracked module before and after a commit: refused there; one that is made
                anew within each step (an inner loop of meta-learning) carries nothing over
    scheduler   of a tracked optimizer: told there, as the run begins; it may be built from `ctx.step` on purpose
    all of it   if optimizers of it step and nothing is ever committed: told, since a step may be long

Another tracked object may hold it, and save it in its own `state_dict`; a scheduler holds its optimizer and does not
save it. Optimizers over anything else (an attack on the inputs, a fit on the side) are nobody's business.

Schedulers are looked for once a run, since that takes a look at every object there is: 55 ms for the 244,000 of a
process that has imported torch and FSDP, which no recovery should take. Thread safety: main thread.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nvrx_sre.checkpoint import tracked as tracking
from nvrx_sre.core.errors import UserError

NUM_UNCOMMITTED_STEPS = 100
"""Steps of one optimizer before the first commit that are told: more than a critic or an inner loop takes, and soon.

Reinforcement learning may take more between two commits, and what is said is true of it as well.
"""


class TrackingWatch:
    """Of one generation, from `ctx.restore()` on.

    `step`: commits so far; `is_first`: the run begins here; `tells`: this rank says what is so on all of them.
    """

    def __init__(self, tracked: Mapping[str, Any], step: Callable[[], int], *, is_first: bool, tells: bool) -> None:
        self._tracked = tracked
        self._step = step
        self._looks_for_schedulers = is_first
        self._tells = tells
        self._uncommitted: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] | None = None
        """Steps of each that trains what is tracked; None once something is committed."""
        if is_first:
            self._uncommitted = weakref.WeakKeyDictionary()
        self._num_uncommitted = 0
        """Most of them that one has taken."""
        self._known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._suspects: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        """Those that are to be tracked if they step again after this step."""
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def finish(self) -> None:
        """The training function has returned: say so if it has trained and committed nothing."""
        if self._num_uncommitted and self._step() == 0:
            self._tell_of_commits("nothing was committed: nothing is saved but what the script wrote itself")

    def close(self) -> None:
        """Look no more."""
        self._hook.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self._known:
            self._examine(optimizer)
        if self._uncommitted is not None:
            self._count(self._uncommitted, optimizer)

    def _examine(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in self._suspects:
            self._look_at(optimizer)
        elif self._suspects[optimizer] != self._step():
            raise UserError(
                f"{type(optimizer).__name__} trains {self._trained_by(optimizer)!r} and is not tracked, so that a "
                "recovery would begin its state anew: call ctx.track(optimizer=...) before ctx.restore()"
            )

    def _count(self, num_steps: MutableMapping[torch.optim.Optimizer, int], optimizer: torch.optim.Optimizer) -> None:
        if self._step() > 0:
            self._uncommitted, self._num_uncommitted = None, 0
        elif optimizer in num_steps:
            num_steps[optimizer] += 1
            if num_steps[optimizer] > self._num_uncommitted:
                self._num_uncommitted = num_steps[optimizer]
                if self._num_uncommitted == NUM_UNCOMMITTED_STEPS:
                    self._tell_of_commits("nothing is committed yet: a recovery would begin at step 0")

    def _tell_of_commits(self, what: str) -> None:
        if self._tells:
            print(
                f"nvrx-sre: the optimizer has stepped {self._num_uncommitted} times and {what}; call "
                "ctx.commit(loss=...) at the end of each step",
                file=sys.stderr,
            )

    def _look_at(self, optimizer: torch.optim.Optimizer) -> None:
        if self._is_kept(optimizer):
            self._known.add(optimizer)
            self._begin_count(optimizer)
            if self._looks_for_schedulers:
                self._looks_for_schedulers = False
                self._look_for_schedulers()
        elif self._trained_by(optimizer):
            self._suspects[optimizer] = self._step()
            self._begin_count(optimizer)
        else:
            self._known.add(optimizer)

    def _begin_count(self, optimizer: torch.optim.Optimizer) -> None:
        if self._uncommitted is not None:
            self._uncommitted[optimizer] = 0

    def _trained_by(self, optimizer: torch.optim.Optimizer) -> str:
        """Name of a tracked module with parameters of it, '' if there is none."""
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return next(
            (
                name
                for name, module in tracking.modules(self._tracked)
                if any(id(parameter) in mine for parameter in module.parameters())
            ),
            "",
        )

    def _look_for_schedulers(self) -> None:
        """Of all tracked optimizers at once: there may be one a parameter."""
        for scheduler in _schedulers():
            optimizer = getattr(scheduler, "optimizer", None)
            if optimizer is not None and self._is_kept(optimizer) and not self._is_kept(scheduler):
                print(
                    f"nvrx-sre: {type(scheduler).__name__} changes a tracked optimizer and is not tracked: unless it "
                    "is built from ctx.step, a recovery begins its schedule anew; ctx.track(scheduler=...) keeps it",
                    file=sys.stderr,
                )

    def _is_kept(self, item: object) -> bool:
        """It is tracked, or a tracked object has it and may save it."""
        held = self._tracked.values()
        return any(value is item for value in held) or any(_may_save(value, item) for value in held)


def _may_save(holder: object, item: object) -> bool:
    if not tracking.is_stateful(holder) or (isinstance(holder, LRScheduler) and not isinstance(item, LRScheduler)):
        return False
    return any(part is item for _, part in tracking.held_by(holder))


def _schedulers() -> Iterator[LRScheduler]:
    """All there are. By `type`: to ask a stranger for its class may run its code."""
    return (item for item in gc.get_objects() if issubclass(type(item), LRScheduler))
