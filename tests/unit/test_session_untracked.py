"""What trains the tracked state without being tracked is refused where it steps; what is somebody else's is let be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LRScheduler, SequentialLR
from torch.optim.optimizer import _global_optimizer_pre_hooks

from nvrx_sre.checkpoint import supported
from nvrx_sre.core.errors import UserError
from nvrx_sre.session.untracked import NUM_UNCOMMITTED_STEPS, TrackingWatch


class Wrapped:
    """An optimizer inside an object that saves it, as training frameworks have them."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


class Commits:
    """How many steps a script has committed."""

    num = 0
    watch: TrackingWatch


@contextmanager
def watching(*, is_first: bool = True, tells: bool = True, **tracked: Any) -> Iterator[Commits]:
    commits = Commits()
    commits.watch = TrackingWatch(tracked, lambda: commits.num, is_first=is_first, tells=tells)
    try:
        yield commits
    finally:
        commits.watch.close()


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1)


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(2, 2)


def test_an_optimizer_of_a_tracked_module_is_refused_behind_a_commit(model: nn.Module) -> None:
    """Its moments would begin anew at each fault; by its kind and the module's name."""
    adam = torch.optim.AdamW(model.parameters())
    with watching(model=model) as commits:
        adam.step()
        adam.step()
        commits.num = 1
        with pytest.raises(UserError, match=r"AdamW trains 'model' and is not tracked"):
            adam.step()


def test_an_optimizer_that_is_made_within_each_step_is_let_be(model: nn.Module) -> None:
    """An inner loop of meta-learning carries nothing over a commit."""
    with watching(model=model) as commits:
        for commits.num in range(3):
            inner = torch.optim.Adam(model.parameters())
            inner.step()
            inner.step()
    assert commits.num == 2


def test_what_is_tracked_steps(model: nn.Module) -> None:
    """Itself, or within an object that has it in its state."""
    optimizer, other = sgd(model), sgd(model)
    scheduler = ExponentialLR(optimizer, 0.9)
    with watching(model=model, optimizer=optimizer, scheduler=scheduler, both=Wrapped(other)) as commits:
        for commits.num in range(2):
            optimizer.step()
            other.step()
            scheduler.step()
    assert scheduler.last_epoch == 2


@pytest.mark.parametrize("form", [list, tuple, lambda items: dict(enumerate(items))])
def test_an_object_may_keep_several_optimizers(model: nn.Module, form: Any) -> None:
    """In a list or under names, as trainers of several models do."""
    first, second = sgd(model), sgd(model)
    holder = Wrapped(first)
    holder.optimizers = form([first, second])  # type: ignore[attr-defined]  # a stranger's own
    with watching(model=model, holder=holder) as commits:
        second.step()
        commits.num = 1
        second.step()
        strange = sgd(model)
        strange.step()
        commits.num = 2
        with pytest.raises(UserError, match="SGD trains 'model'"):
            strange.step()


def test_all_schedulers_are_looked_for_at_once(model: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    """With an optimizer a parameter, a look at every object for each would take half a minute."""
    optimizers = {name: torch.optim.SGD([item], lr=0.1) for name, item in model.named_parameters()}
    schedulers = [ExponentialLR(item, 0.9) for item in optimizers.values()]
    with watching(model=model, **optimizers):
        optimizers["weight"].step()
        assert capsys.readouterr().err.count("ExponentialLR changes a tracked optimizer") == len(schedulers)
        optimizers["bias"].step()
        assert not capsys.readouterr().err


def test_an_optimizer_over_something_else_is_let_be(model: nn.Module) -> None:
    """An attack on the inputs makes one at each step, and has nothing to restore."""
    inputs = torch.zeros(2, requires_grad=True)
    inputs.grad = torch.ones(2)
    attack = torch.optim.SGD([inputs], lr=1.0)
    with watching(model=model) as commits:
        for commits.num in range(2):
            attack.step()
    assert inputs.tolist() == [-2.0, -2.0]


@pytest.mark.parametrize("kept", [False, True])
def test_a_scheduler_of_a_tracked_optimizer_is_told(
    model: nn.Module, kept: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its schedule would begin anew, unless the script builds it from the step; said once, and not if it is tracked."""
    optimizer = sgd(model)
    scheduler = CosineAnnealingLR(optimizer, 10)
    more = {"scheduler": scheduler} if kept else {}
    with watching(model=model, optimizer=optimizer, **more):
        optimizer.step()
        optimizer.step()
    assert capsys.readouterr().err.count("CosineAnnealingLR changes a tracked optimizer") == (0 if kept else 1)


def test_a_scheduler_does_not_keep_its_optimizer(model: nn.Module) -> None:
    """Tracking the scheduler alone saves no moment."""
    optimizer = sgd(model)
    with watching(model=model, scheduler=ExponentialLR(optimizer, 0.9)) as commits:
        optimizer.step()
        commits.num = 1
        with pytest.raises(UserError, match="SGD trains 'model'"):
            optimizer.step()


def test_schedulers_within_a_tracked_one_are_kept(model: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    """A sequence of schedulers saves its parts."""
    optimizer = sgd(model)
    parts: list[LRScheduler] = [ExponentialLR(optimizer, 0.9), ExponentialLR(optimizer, 0.8)]
    whole = SequentialLR(optimizer, parts, milestones=[5])
    with watching(model=model, optimizer=optimizer, scheduler=whole):
        optimizer.step()
    assert not capsys.readouterr().err


def test_a_recovery_looks_for_no_scheduler(model: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    """That takes a look at every object there is; the beginning of the run did it."""
    optimizer = sgd(model)
    scheduler = ExponentialLR(optimizer, 0.9)
    with watching(is_first=False, model=model, optimizer=optimizer):
        optimizer.step()
    assert scheduler.last_epoch == 0
    assert not capsys.readouterr().err


def step_often(*optimizers: torch.optim.Optimizer, num_steps: int = NUM_UNCOMMITTED_STEPS) -> None:
    for _ in range(num_steps):
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("kept", [True, False])
def test_a_forgotten_commit_is_told_once_and_soon(
    model: nn.Module, kept: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether the optimizer is tracked or not: a fault days later would begin at step 0."""
    first, second = sgd(model), sgd(model)
    with watching(model=model, **({"first": first, "second": second} if kept else {})):
        step_often(first, second, num_steps=NUM_UNCOMMITTED_STEPS - 1)
        assert not capsys.readouterr().err
        step_often(first, second, num_steps=NUM_UNCOMMITTED_STEPS)
    assert capsys.readouterr().err == (
        "nvrx-sre: the optimizer has stepped 100 times and nothing is committed yet: a recovery would begin at step 0; "
        "call ctx.commit(loss=...) at the end of each step\n"
    )


def test_a_run_that_returns_without_a_commit_is_told(model: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends as finished, since what it had to do is done; that nothing is saved is said, however short it was."""
    optimizer = sgd(model)
    with watching(model=model, optimizer=optimizer) as commits:
        step_often(optimizer, num_steps=31)
        commits.watch.finish()
    said = capsys.readouterr().err
    assert "has stepped 31 times and nothing was committed: nothing is saved but what the script wrote" in said


def test_one_rank_tells_of_a_forgotten_commit(model: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    """All forget it alike."""
    optimizer = sgd(model)
    with watching(model=model, optimizer=optimizer, tells=False) as commits:
        step_often(optimizer)
        commits.watch.finish()
    assert not capsys.readouterr().err


def test_steps_of_optimizers_beside_each_other_are_one_step(
    model: nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    """An optimizer a parameter makes hundreds of steps before the first commit, each its first."""
    optimizers = {f"number{i}": sgd(model) for i in range(2 * NUM_UNCOMMITTED_STEPS)}
    with watching(model=model, **optimizers):
        step_often(*optimizers.values(), num_steps=1)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("num_steps_each", [1, 5, NUM_UNCOMMITTED_STEPS - 1])
def test_who_commits_hears_nothing(model: nn.Module, num_steps_each: int, capsys: pytest.CaptureFixture[str]) -> None:
    """However many steps its optimizer takes between two commits, as a critic's or that of an agent does."""
    optimizer = sgd(model)
    with watching(model=model, optimizer=optimizer) as commits:
        for commits.num in range(4):
            step_often(optimizer, num_steps=num_steps_each)
        step_often(optimizer)
        commits.watch.finish()
    assert not capsys.readouterr().err


def test_who_trains_nothing_hears_nothing_of_commits(model: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    """An evaluation; one that attacks its inputs; and a run that goes on behind commits, and has nothing left to do."""
    optimizer = sgd(model)
    attack = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=1.0)
    with watching(model=model, optimizer=optimizer) as commits:
        commits.watch.finish()
        step_often(attack)
        commits.watch.finish()
    with watching(is_first=False, model=model, optimizer=optimizer) as commits:
        commits.num = 7
        commits.watch.finish()
    assert not capsys.readouterr().err


def test_nothing_is_left_of_a_watch(model: nn.Module) -> None:
    """The generations after it would be watched by it, and its model stay."""
    before = len(_global_optimizer_pre_hooks)
    with watching(model=model):
        assert len(_global_optimizer_pre_hooks) == before + 1
    assert len(_global_optimizer_pre_hooks) == before
    sgd(model).step()


def test_nothing_tracked_is_refused() -> None:
    """A run whose every fault begins at the first weights would count as recovered."""
    with pytest.raises(UserError, match=r"nothing is tracked: call ctx\.track"):
        supported.check({})
