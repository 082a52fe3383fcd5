"""A tracked DataLoader goes on behind the batches that were handed out, whatever was prefetched."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from nvrx_sre.checkpoint import rng
from nvrx_sre.core.errors import UserError
from nvrx_sre.session.loading import follow_loaders

NUM_SAMPLES = 23
BATCH = 4


class Noisy(Dataset[Any]):
    """Item i is (i, three random numbers): an augmentation that draws from every global stream."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)


class Shuffled(Sampler[int]):
    """Draws its order from Python's own stream, as many a script does."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[int]:
        order = list(range(NUM_SAMPLES))
        random.shuffle(order)
        return iter(order)


def make(kind: str, num_workers: int = 0, persistent: bool = False) -> DataLoader[Any]:
    """A loader of `kind`, as a script would build it."""
    data = Noisy()
    common: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": persistent}
    if kind == "shuffle":
        return DataLoader(data, batch_size=BATCH, shuffle=True, **common)
    if kind == "generator":
        return DataLoader(data, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(5), **common)
    if kind == "replacement":
        sampler = RandomSampler(data, replacement=True, num_samples=40, generator=torch.Generator().manual_seed(6))
        return DataLoader(data, batch_size=BATCH, sampler=sampler, generator=sampler.generator, **common)
    if kind == "sampler's generator":
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(7))
        return DataLoader(data, batch_size=BATCH, sampler=sampler, **common)
    if kind == "distributed":
        return DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, 2, 1, seed=3), **common)
    if kind == "own sampler":
        return DataLoader(data, batch_size=BATCH, sampler=Shuffled(), drop_last=True, **common)
    if kind == "batch sampler":
        return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 5, False), **common)
    assert kind == "unbatched"
    return DataLoader(data, batch_size=None, sampler=SequentialSampler(data), **common)


KINDS = [
    "shuffle",
    "generator",
    "replacement",
    "sampler's generator",
    "distributed",
    "own sampler",
    "batch sampler",
    "unbatched",
]


class Script:
    """A training loop of three epochs that draws numbers of its own in every step."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        follow_loaders({"loader": loader})
        self.seen: list[Any] = []
        self.saved: list[str] = []
        self.epoch = 0

    def run(self, num_steps: int) -> None:
        """Train until `num_steps` batches were seen, and save after each."""
        while len(self.seen) < num_steps:
            if isinstance(self.loader.sampler, DistributedSampler):
                self.loader.sampler.set_epoch(self.epoch)
            for batch in self.loader:
                noise = torch.rand(()).item() + random.random() + np.random.rand()
                self.seen.append((batch.tolist(), noise))
                self.saved.append(self.save())
                if len(self.seen) == num_steps:
                    return
            self.epoch += 1

    def save(self) -> str:
        """What a commit would hold."""
        loader = self.loader.state_dict()  # type: ignore[attr-defined]
        return json.dumps({"loader": loader, "rng": rng.get_state(), "epoch": self.epoch})

    def load(self, text: str) -> None:
        """What a restore would do."""
        state = json.loads(text)
        self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
        rng.set_state(state["rng"])
        self.epoch = state["epoch"]


@pytest.mark.parametrize("kind", KINDS)
def test_c22_any_step_of_any_epoch_is_resumed_exactly(kind: str) -> None:
    """Samples, their augmentation and the script's own draws are the uninterrupted run's from every step on."""
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    whole = Script(make(kind))
    whole.run(17)
    for step in range(1, 17):
        torch.manual_seed(99)
        resumed = Script(make(kind))
        resumed.load(whole.saved[step - 1])
        resumed.run(17 - step)
        assert resumed.seen == whole.seen[step:], f"after step {step}"
        assert resumed.saved == whole.saved[step:]


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "persistent"), [("shuffle", False), ("distributed", True)])
def test_c22_batches_prefetched_and_not_consumed_are_not_lost(kind: str, persistent: bool) -> None:
    """Two workers run four batches ahead; a resume with one worker gives the same, augmentation included."""
    torch.manual_seed(1)
    whole = Script(make(kind, num_workers=2, persistent=persistent))
    whole.run(11)
    for step, num_workers in ((2, 2), (5, 1)):
        torch.manual_seed(99)
        resumed = Script(make(kind, num_workers=num_workers, persistent=persistent))
        resumed.load(whole.saved[step - 1])
        resumed.run(11 - step)
        assert resumed.seen == whole.seen[step:], f"after step {step} with {num_workers} workers"


def test_an_uninterrupted_iteration_yields_what_the_plain_loader_does() -> None:
    """Tracking a loader changes no sample and no random number."""
    for kind in KINDS:
        plain, tracked = make(kind), make(kind)
        follow_loaders({"loader": tracked})
        runs = []
        for loader in (plain, tracked):
            torch.manual_seed(4)
            random.seed(5)
            np.random.seed(6)
            runs.append([[batch.tolist() for _ in range(2) for batch in loader], torch.rand(()).item()])
        assert runs[0] == runs[1], kind


def test_the_end_of_an_epoch_is_a_position_too() -> None:
    """Saved after the last batch of an epoch: no batch is left of it, also if the script has moved on by itself."""
    whole = Script(make("distributed"))
    whole.run(3)
    resumed = Script(make("distributed"))
    resumed.load(whole.saved[2])
    assert list(resumed.loader) == []
    moved_on = Script(make("distributed"))
    moved_on.load(whole.saved[2])
    moved_on.loader.sampler.set_epoch(1)  # type: ignore[attr-defined]
    assert len(list(moved_on.loader)) == 3


class Training:
    """A script after the guide: epochs from the sampler's own, a commit each batch; `other` is for evaluations."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.loader = make("distributed")
        self.other = make("shuffle")
        follow_loaders({"loader": self.loader, "other": self.other}, lambda: self.num_steps)

    def run(self, num_epochs: int) -> list[int]:
        """Batches trained in each epoch from the one that the sampler is set to."""
        trained = []
        for epoch in range(self.loader.sampler.epoch, num_epochs):  # type: ignore[attr-defined]
            self.loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            before = self.num_steps
            for _ in self.loader:
                self.num_steps += 1
            trained.append(self.num_steps - before)
        return trained

    def state(self, name: str) -> Any:
        """What a capture would hold of a loader."""
        return json.loads(json.dumps(getattr(self, name).state_dict()))


def test_a_finished_training_is_not_trained_again() -> None:
    """Saved after the last pass, since no slot was free at its last commit: the pass is done, more epochs follow it."""
    script = Training()
    assert script.run(2) == [3, 3]
    again = Training()
    again.loader.load_state_dict(script.state("loader"))  # type: ignore[attr-defined]
    assert again.run(2) == [0]
    more = Training()
    more.loader.load_state_dict(script.state("loader"))  # type: ignore[attr-defined]
    assert more.run(4) == [0, 3, 3]


def test_a_pass_without_a_commit_is_done_at_its_end() -> None:
    """A loader of an evaluation, after the last commit or before it: the next evaluation gets all of it."""
    script = Training()
    script.run(1)
    assert len(list(script.other)) == 6
    assert not script.state("other")["active"]
    assert script.state("loader")["active"], "the pass of the last commit"
    script.num_steps += 1
    assert not script.state("loader")["active"], "a commit after the pass: it is over"
    script.loader.sampler.set_epoch(1)  # type: ignore[attr-defined]
    assert not script.state("loader")["active"]


def test_a_wrong_epoch_is_refused_not_trained() -> None:
    """A script that starts its epochs at 0 after a restore would train other samples."""
    whole = Script(make("distributed"))
    whole.run(5)
    resumed = Script(make("distributed"))
    resumed.load(whole.saved[4])
    assert resumed.loader.sampler.epoch == 1  # type: ignore[attr-defined]
    resumed.loader.sampler.set_epoch(0)  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="middle of epoch 1"):
        iter(resumed.loader)


def test_other_data_is_refused_not_trained() -> None:
    """Another batch size gives another order: the indices that were handed out are compared."""
    torch.manual_seed(1)
    whole = Script(make("shuffle"))
    whole.run(2)
    other = DataLoader(Noisy(), batch_size=BATCH + 1, shuffle=True)
    follow_loaders({"loader": other})
    other.load_state_dict(json.loads(whole.saved[1])["loader"])  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="other samples"):
        next(iter(other))


class Endless(IterableDataset[int]):
    """Only it knows where it is."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class Wrapping(DataLoader[Any]):
    """A loader whose batches do not come from torch's iterator."""

    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("loader", "word"),
    [
        (DataLoader(Endless()), "iterable"),
        (Wrapping(Noisy()), "__iter__"),
        (DataLoader(Noisy(), in_order=False), "in_order"),
    ],
)
def test_a_position_that_cannot_be_known_is_refused_with_advice(loader: DataLoader[Any], word: str) -> None:
    """One line: what is wrong, and what to do."""
    with pytest.raises(UserError, match=word) as refused:
        follow_loaders({"train": loader})
    assert "train" in str(refused.value)
    assert "use " in str(refused.value)


def test_two_iterations_at_once_are_refused() -> None:
    """Their position would be two."""
    loader = make("shuffle")
    follow_loaders({"loader": loader})
    first = iter(loader)
    next(first)
    next(iter(loader))
    with pytest.raises(UserError, match="finish one iteration"):
        next(first)


def resharded(states: list[dict[str, Any]], world_size: int, per_rank: int) -> list[list[int]]:
    """Sample ids of the rest of the epoch at another world size: step -> ids of all ranks."""
    ranks = []
    for rank in range(world_size):
        data = Noisy()
        loader = DataLoader(data, batch_size=per_rank, sampler=DistributedSampler(data, world_size, rank, seed=3))
        follow_loaders({"loader": loader})
        loader.load_resharded(states, rank, world_size)  # type: ignore[attr-defined]
        assert loader.sampler.epoch == 1  # type: ignore[attr-defined]
        ranks.append([batch[:, 0].long().tolist() for batch in loader])
    return [[sample for part in step for sample in part] for step in zip(*ranks, strict=True)]


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_c22_another_world_size_goes_on_in_the_same_global_order(world_size: int) -> None:
    """Two ranks consumed two steps of twelve samples; what is left comes once each, and each step holds the same."""
    states, consumed = [], []
    for rank in range(2):
        data = Noisy()
        loader = DataLoader(data, batch_size=6, sampler=DistributedSampler(data, 2, rank, seed=3))
        follow_loaders({"loader": loader})
        loader.sampler.set_epoch(1)  # type: ignore[attr-defined]
        batches = iter(loader)
        consumed += next(batches)[:, 0].long().tolist()
        states.append(json.loads(json.dumps(loader.state_dict())))  # type: ignore[attr-defined]
        last = next(batches)[:, 0].long().tolist()
    steps = resharded(states, world_size, 12 // world_size)
    assert len(steps) == 1
    assert set(steps[0]) | set(consumed) == set(range(NUM_SAMPLES))
    assert len(set(steps[0]) - set(consumed)) == NUM_SAMPLES - 12
    assert set(last) <= set(steps[0]) | {steps[0][0]} | set(consumed)


def test_a_second_change_of_the_world_size_counts_from_the_first() -> None:
    """2 ranks, then 1 for a step, then 2 again: no sample lost or twice."""
    data = Noisy()

    def loader_of(rank: int, world_size: int, per_rank: int) -> Any:
        sampler: DistributedSampler[Any] = DistributedSampler(data, world_size, rank, seed=3)
        loader = DataLoader(data, batch_size=per_rank, sampler=sampler)
        follow_loaders({"loader": loader})
        return loader

    seen: list[int] = []
    states = []
    for rank in range(2):
        loader = loader_of(rank, 2, 4)
        seen += next(iter(loader))[:, 0].long().tolist()
        states.append(loader.state_dict())
    alone = loader_of(0, 1, 8)
    alone.load_resharded(states, 0, 1)
    batches = iter(alone)
    seen += next(batches)[:, 0].long().tolist()
    state = alone.state_dict()
    again = loader_of(0, 1, 8)  # and the same world once more, in the middle of the rest
    again.load_state_dict(json.loads(json.dumps(state)))
    assert next(iter(again))[:, 0].tolist() == next(batches)[:, 0].tolist()
    for rank in range(2):
        loader = loader_of(rank, 2, 4)
        loader.load_resharded([state], rank, 2)
        seen += [sample for batch in loader for sample in batch[:, 0].long().tolist()]
    assert len(seen) == NUM_SAMPLES + 1  # one to fill up, as the sampler does
    assert set(seen) == set(range(NUM_SAMPLES))


def test_c22_a_position_of_one_rank_is_not_dealt_out() -> None:
    """A plain shuffle at another world size: refused, with what to do."""
    loader = make("shuffle")
    follow_loaders({"loader": loader})
    states = [loader.state_dict(), loader.state_dict()]  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="DistributedSampler"):
        loader.load_resharded(states, 0, 1)  # type: ignore[attr-defined]
