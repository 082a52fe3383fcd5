"""Where an iteration over a sampler stands, and how it is begun again there.

Model: a `Position` belongs to one loader. An iteration draws its order (indices of samples, batched or single) from
a sampler; before the first draw the random states that the sampler may use are recorded. To resume, they are put
back, the order is drawn again and what was handed out is passed over. A chain hash of the indices handed out is
part of the position, so an order that came out otherwise is an error and never other data.

Indices run ahead of batches where workers prefetch; `num_batches` and the chain follow the batches.
Thread safety: main thread. Must not: load data, draw numbers that a loader would not draw.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from nvrx_sre.checkpoint import rng
from nvrx_sre.core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Order:
    """Gives the indices of an iteration: `whole`, or `rest(skipped)` behind what another world has consumed."""

    whole: Iterable[Any]
    rest: Callable[[int], Iterable[Any]]


@dataclass
class Iteration:
    """One pass over the loader. `drawn`: random states just before its order was drawn, None until then."""

    name: str
    epoch: int | None = None
    began_at: int = 0
    """Steps committed before it."""
    skipped: int = 0
    num_batches: int = 0
    num_samples: int = 0
    chain: int = 0
    length: int | None = None
    """Batches of the whole iteration, None where the sampler does not know."""
    drawn: dict[str, Any] | None = None
    resumed: bool = False
    ahead: deque[tuple[int, int]] = field(default_factory=deque)
    """(samples, chain) behind each batch whose indices were drawn and which was not handed out yet."""


class Position:
    """The current iteration of one loader, None between two.

    `generator`: the loader's own, if it has one; `step`: steps committed so far.
    """

    def __init__(self, generator: torch.Generator | None, step: Callable[[], int]) -> None:
        self.iteration: Iteration | None = None
        self._generator = generator
        self._step = step
        self._saved: dict[str, Any] | None = None
        self._ended: tuple[Iteration, int] | None = None
        """The iteration that has ended, and the steps committed by then."""

    def state(self, epoch: int | None) -> dict[str, Any]:
        """JSON-ready. `epoch`: what the sampler is set to."""
        current = self.iteration or self._committed_end(epoch)
        if current is None and self._saved is not None:
            return self._saved  # loaded and not iterated since
        idle = Iteration(name="")
        shown = current or idle
        return {
            "active": current is not None,
            "skipped": shown.skipped,
            "num_batches": shown.num_batches,
            "num_samples": shown.num_samples,
            "chain": shown.chain,
            "length": shown.length,
            "drawn": shown.drawn,
            "generator": _generator_text(self._generator),
        }

    def resume(self, state: dict[str, Any]) -> None:
        """The next `start` goes on behind `state`."""
        self.iteration = self._ended = None
        self._saved = state
        if self._generator is not None and state["generator"] is not None:
            self._generator.set_state(rng.state_of(state["generator"]))

    def start(self, name: str, epoch: int | None) -> Iteration:
        """Begin an iteration: a new one, or the one that was loaded, which may have no batch left.

        Raises `UserError` if that one has and belongs to another epoch than the sampler is set to.
        """
        saved, self._saved = self._saved, None
        self.iteration = Iteration(name=name, epoch=epoch, began_at=self._step())
        if saved is None or not saved["active"]:
            return self.iteration
        if saved["epoch"] != epoch:
            if saved["num_batches"] == saved["length"]:
                return self.iteration
            raise UserError(
                f"loader {name!r} was restored in the middle of epoch {saved['epoch']} and its sampler is now set to "
                f"epoch {epoch}: begin with the sampler's own `epoch` after ctx.restore()"
            )
        self.iteration.skipped = int(saved["skipped"])
        self.iteration.num_batches = int(saved["num_batches"])
        self.iteration.num_samples = int(saved["num_samples"])
        self.iteration.chain = int(saved["chain"])
        self.iteration.drawn = saved["drawn"]
        self.iteration.resumed = True
        return self.iteration

    def handed_out(self) -> None:
        """The next batch went to the training loop."""
        current = self.iteration
        assert current is not None
        num_samples, current.chain = current.ahead.popleft()
        current.num_batches += 1
        current.num_samples += num_samples

    def finish(self) -> None:
        """The iteration gave its last batch before."""
        assert self.iteration is not None
        self._ended, self.iteration = (self.iteration, self._step()), None

    def _committed_end(self, epoch: int | None) -> Iteration | None:
        """The iteration that ended after the newest commit, which was made in it."""
        if self._ended is None:
            return None
        iteration, num_steps = self._ended
        is_last_known = iteration.began_at < num_steps == self._step() and iteration.epoch == epoch
        return iteration if is_last_known else None

    def begin_order(self, current: Iteration) -> Callable[[], None]:
        """Call before the order is drawn, and what it returns after the first and the skipped ones were.

        Records the random states, or puts the recorded ones in their place until then.
        """
        if current.drawn is None:
            current.drawn = {"global": rng.get_state(), "generator": _generator_text(self._generator)}
            return lambda: None
        kept = rng.get_state()
        rng.set_state(current.drawn["global"])
        if self._generator is not None and current.drawn["generator"] is not None:
            self._generator.set_state(rng.state_of(current.drawn["generator"]))
        return lambda: rng.set_state(kept)


class PositionedSampler:
    """The sampler of the inner loader: the order of the current iteration behind its position.

    With `tagged` each entry is (text to seed with, indices).
    """

    def __init__(self, position: Position, order: Callable[[], Order], *, tagged: bool) -> None:
        self._position = position
        self._order = order
        self._tagged = tagged

    def __iter__(self) -> Iterator[Any]:
        current = self._position.iteration
        assert current is not None
        end_of_draw = self._position.begin_order(current)
        order = self._order()
        indices = order.rest(current.skipped) if current.skipped else order.whole
        current.length = _length(indices)
        entries = iter(indices)
        chain = _pass_over(entries, current)
        number = current.num_batches
        source = _seed_source(current)
        entry = next(entries, None)
        end_of_draw()
        while entry is not None:
            chain = _link(chain, entry)
            current.ahead.append((_count(entry), chain))
            yield (f"{source}/{current.skipped}/{number}", entry) if self._tagged else entry
            number += 1
            entry = next(entries, None)


def _pass_over(entries: Iterator[Any], current: Iteration) -> int:
    """Leave out what was handed out already; the chain behind it. Raises `UserError` if it is not what it was."""
    chain = 0
    for _ in range(current.num_batches):
        chain = _link(chain, next(entries, None))
    if chain != current.chain:
        raise UserError(
            f"loader {current.name!r} gives other samples than before in its first {current.num_batches} batches: "
            "its data set, batch size or seed has changed, or its sampler draws numbers that belong to nobody's state"
        )
    return chain


def _seed_source(current: Iteration) -> str:
    """What workers are seeded from: the streams that torch's own loader takes their seed from, and no other."""
    assert current.drawn is not None
    streams = f"{current.drawn['global']['torch']}/{current.drawn['generator']}"
    return xxhash.xxh3_128_hexdigest(streams.encode())


def _link(chain: int, entry: Any) -> int:
    return xxhash.xxh3_64_intdigest(repr(entry).encode(), seed=chain)


def _length(indices: Iterable[Any]) -> int | None:
    try:
        return len(indices)  # type: ignore[arg-type]  # a sampler need not have one: that is the question
    except (TypeError, NotImplementedError):
        return None


def _count(entry: Any) -> int:
    return len(entry) if isinstance(entry, list | tuple) else 1


def _generator_text(generator: torch.Generator | None) -> str | None:
    return None if generator is None else rng.state_text(generator.get_state())
