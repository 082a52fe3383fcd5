"""A plain `DataLoader` with a position: `ctx.track(loader=loader)`, and `for batch in loader` goes on where it was.

Model: the loader's class is replaced by a subclass of it with `state_dict` and `load_state_dict`, as FSDP does
with modules. An iteration goes through an inner loader that is the same but for its sampler, which knows
the position (`session.positions`). What counts is the number of batches handed out: batches that workers have
prefetched and nobody was given are made again, not lost.

    position = where the sampler's order comes from (epoch; random state when the order was drawn) + batches handed out

A pass in which a step was committed is over with the next commit, not with its last batch: what is saved in between, at
the end of a training, is still the state of the commit before.

With workers, each batch is loaded under random numbers of its own, derived from that order and the batch's number:
what a worker draws depends on neither the number of workers nor where a run was resumed.

Into another world size goes a `DistributedSampler` under a plain `BatchSampler`: its epoch's order is global, and
what the old world has consumed of it is a beginning. Everything else is refused, since its position is one rank's.

Thread safety: main thread. Must not: change what an uninterrupted iteration yields, guess a position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset

from nvrx_sre.checkpoint import rng
from nvrx_sre.core.errors import UserError
from nvrx_sre.session.positions import Order, Position, PositionedSampler

_ADVICE = "give it a state_dict() and load_state_dict(), or use torchdata's StatefulDataLoader"


def follow_loaders(
    tracked: Mapping[str, object],
    step: Callable[[], int] = lambda: 0,
    at_end: Callable[[], None] = lambda: None,
    at_batch: Callable[[], None] = lambda: None,
) -> None:
    """Give every plain `DataLoader` among `tracked` a position, from its beginning; loaders with a state keep theirs.

    `step`: steps committed so far; `at_end`: called at the end of a pass, `at_batch` with each batch, before the script
    goes on. Raises `UserError` for a loader whose position cannot be known.
    """
    for name, value in tracked.items():
        if isinstance(value, DataLoader) and (isinstance(value, FollowedLoader) or not hasattr(value, "state_dict")):
            _followed(name, value).begin(name, step, at_end, at_batch)


def _followed(name: str, loader: DataLoader[Any]) -> FollowedLoader:
    if isinstance(loader, FollowedLoader):
        return loader
    cls = type(loader)
    if isinstance(loader.dataset, IterableDataset):
        raise UserError(
            f"ctx.track({name}=...): the data set of this DataLoader is iterable: only it knows its position: {_ADVICE}"
        )
    if cls.__iter__ is not DataLoader.__iter__:
        raise UserError(f"ctx.track({name}=...): {cls.__name__} has an __iter__ of its own: {_ADVICE}")
    if not getattr(loader, "in_order", True):
        raise UserError(f"ctx.track({name}=...): a DataLoader with in_order=False cannot be resumed: use in_order=True")
    loader.__class__ = type(f"Followed{cls.__name__}", (FollowedLoader, cls), {})
    assert isinstance(loader, FollowedLoader)
    return loader


class FollowedLoader(DataLoader[Any]):
    """A `DataLoader` that knows how many batches of the current iteration it has handed out."""

    _name: str
    _position: Position
    _inner: DataLoader[Any] | None
    _at_end: Callable[[], None]
    _at_batch: Callable[[], None]

    def begin(
        self, name: str, step: Callable[[], int], at_end: Callable[[], None], at_batch: Callable[[], None]
    ) -> None:
        """Start from the beginning, with new workers; see `follow_loaders`."""
        self._name = name
        self._position = Position(generator=_generator(self), step=step)
        self._inner = None
        self._at_end, self._at_batch = at_end, at_batch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its own private iterator class
        iteration = self._position.start(self._name, _epoch(self))
        # A resumed iteration has drawn its order before: what is drawn here again must not shift the rank's stream.
        kept = rng.get_state() if iteration.resumed else None
        if self._inner is None or not self.persistent_workers:
            self._inner = self._make_inner()
        batches = iter(self._inner)
        if kept is not None:
            rng.set_state(kept)
        return _Batches(self._position, batches, self._name, self._at_end, self._at_batch)

    def _make_inner(self) -> DataLoader[Any]:
        """The same loader over a sampler that knows the position."""
        seeded = self.num_workers > 0
        sampler = PositionedSampler(self._position, lambda: _orders(self), tagged=seeded)
        batched = self.batch_sampler is not None
        return DataLoader(
            _SeededDataset(self.dataset) if seeded else self.dataset,
            batch_size=1 if batched else None,
            sampler=None if batched else sampler,
            batch_sampler=sampler if batched else None,
            num_workers=self.num_workers,
            collate_fn=self.collate_fn,
            pin_memory=self.pin_memory,
            timeout=self.timeout,
            worker_init_fn=self.worker_init_fn,
            multiprocessing_context=self.multiprocessing_context,
            generator=self.generator,
            prefetch_factor=self.prefetch_factor,
            persistent_workers=self.persistent_workers,
        )

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was handed out."""
        sampler = _distributed(self)
        epoch = _epoch(self)
        here = {"epoch": epoch, "num_replicas": sampler.num_replicas if sampler is not None else None}
        return here | self._position.state(epoch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration begins behind `state`; a sampler with an epoch is set to that of `state`."""
        _set_epoch(self, state["epoch"])
        self._position.resume(state)

    def load_resharded(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> None:
        """Go on from what the ranks of another world have consumed between them.

        Raises `UserError` if the sampler's order is not one over all ranks.
        """
        state = states[0]
        sampler = _distributed(self)
        if sampler is None or state["num_replicas"] is None:
            raise UserError(
                f"{self._name!r} was saved by {len(states)} ranks and cannot be dealt out to {world_size}: "
                "use a torch.utils.data.DistributedSampler, or start again with that number of ranks"
            )
        common = ("active", "epoch", "num_samples", "skipped", "num_replicas")
        if any([other[key] for key in common] != [state[key] for key in common] for other in states):
            raise UserError(f"the ranks that saved {self._name!r} had consumed different numbers of samples")
        consumed = state["skipped"] + state["num_samples"] * state["num_replicas"]
        self.load_state_dict(
            {**state, "skipped": consumed, "num_batches": 0, "num_samples": 0, "chain": 0, "drawn": None}
        )


class _Batches:
    """Iterator over the batches of one iteration; counts what it hands out."""

    def __init__(
        self,
        position: Position,
        batches: Iterator[Any],
        name: str,
        at_end: Callable[[], None],
        at_batch: Callable[[], None],
    ) -> None:
        self._at_end, self._at_batch = at_end, at_batch
        self._position = position
        self._iteration = position.iteration
        self._batches = batches
        self._name = name

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:
        if self._position.iteration is not self._iteration:
            raise UserError(f"loader {self._name!r} is tracked: finish one iteration over it before the next")
        try:
            batch = next(self._batches)
        except StopIteration:
            self._position.finish()
            self._at_end()
            raise
        self._position.handed_out()
        self._at_batch()
        return batch


class _SeededDataset(Dataset[Any]):
    """In a worker: a data set whose items are asked for with the random numbers to make them under."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, tagged: tuple[str, Any]) -> Any:
        text, index = tagged
        rng.seed_from(text)
        return self._dataset[index]

    def __getitems__(self, tagged: tuple[str, list[Any]]) -> Any:
        text, indices = tagged
        rng.seed_from(text)
        if callable(getattr(self._dataset, "__getitems__", None)):
            return self._dataset.__getitems__(indices)
        return [self._dataset[index] for index in indices]


def _orders(loader: FollowedLoader) -> Order:
    """What gives the order of one iteration of `loader`, whole or behind `skipped` samples of all ranks."""
    whole: Iterable[Any] = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    sampler = _distributed(loader)

    def rest(skipped: int) -> Iterable[Any]:
        assert sampler is not None  # only `load_resharded` skips, and it asked
        mine = _share(sampler, skipped)
        batches = loader.batch_sampler
        return BatchSampler(mine, batches.batch_size, batches.drop_last) if isinstance(batches, BatchSampler) else mine

    return Order(whole=whole, rest=rest)


def _share(sampler: DistributedSampler[Any], skipped: int) -> list[int]:
    """This rank's part of the sampler's epoch behind the first `skipped` samples of all ranks."""
    alone: DistributedSampler[Any] = DistributedSampler(
        sampler.dataset, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed
    )
    alone.set_epoch(sampler.epoch)
    order = list(alone)
    rest = order[skipped:]
    surplus = len(rest) % sampler.num_replicas
    if surplus and sampler.drop_last:
        rest = rest[:-surplus]
    elif surplus:  # as the sampler does: filled up from the beginning
        missing = sampler.num_replicas - surplus
        rest += (order * -(-missing // len(order)))[:missing]
    return rest[sampler.rank :: sampler.num_replicas]


def _distributed(loader: DataLoader[Any]) -> DistributedSampler[Any] | None:
    """The sampler, if its order is one over all ranks and nothing but batching stands between."""
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        return None
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler.sampler
    return sampler if type(sampler) is DistributedSampler else None


def _generator(loader: DataLoader[Any]) -> torch.Generator | None:
    """What the order is drawn from, None for torch's own stream: a sampler's generator goes before the loader's."""
    batch_sampler = loader.batch_sampler
    for item in (batch_sampler, getattr(batch_sampler, "sampler", None), loader.sampler, loader):
        found = getattr(item, "generator", None)
        if isinstance(found, torch.Generator):
            return found
    return None


def _with_epoch(loader: DataLoader[Any]) -> Any:
    """The first of batch sampler and sampler that has a settable epoch, None if neither has."""
    batch_sampler = loader.batch_sampler
    for item in (batch_sampler, getattr(batch_sampler, "sampler", None), loader.sampler):
        if callable(getattr(item, "set_epoch", None)) and isinstance(getattr(item, "epoch", None), int):
            return item
    return None


def _epoch(loader: DataLoader[Any]) -> int | None:
    item = _with_epoch(loader)
    return None if item is None else int(item.epoch)


def _set_epoch(loader: DataLoader[Any], epoch: int | None) -> None:
    item = _with_epoch(loader)
    if item is not None and epoch is not None:
        item.set_epoch(epoch)
