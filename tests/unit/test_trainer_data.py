"""The exact data order: a permutation an epoch, independent of the number of ranks, a function of the step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvrx_sre.core.errors import UserError
from nvrx_sre.trainer.config import TrainerConfig
from nvrx_sre.trainer.corpus import Corpus
from nvrx_sre.trainer.data import DataOrder, Indices, permute, rank_slots, sample_ids


def corpus_of(num_bytes: int) -> Corpus:
    """A corpus whose byte i is i modulo 251."""
    return Corpus("a test", (np.arange(num_bytes) % 251).astype(np.uint8), "")


def steps_of(order: DataOrder, steps: range, grad_accum: int) -> list[Indices]:
    """Samples of each micro-batch of the steps."""
    return [order.batch(step, micro).samples for step in steps for micro in range(grad_accum)]


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**64), epoch=st.integers(0, 2**32))
@settings(deadline=None)
def test_an_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    """Every sample once, whatever the size."""
    assert sorted(permute(np.arange(size), size, seed, epoch).tolist()) == list(range(size))


def test_the_order_is_frozen() -> None:
    """Runs of another day, machine or numpy get the same order; these values must never change."""
    assert permute(np.arange(10), 10, 0, 0).tolist() == FROZEN_10
    assert permute(np.array([0, 1, 99_999]), 100_000, 3, 7).tolist() == FROZEN_100000


FROZEN_10 = [6, 7, 4, 2, 9, 8, 1, 0, 3, 5]
FROZEN_100000 = [78648, 94003, 36076]


def test_seed_and_epoch_change_the_order() -> None:
    """Neighbouring seeds and epochs share few positions."""
    base = permute(np.arange(10_000), 10_000, 0, 0)
    for seed, epoch in ((1, 0), (0, 1), (1, 1)):
        other = permute(np.arange(10_000), 10_000, seed, epoch)
        assert int((other == base).sum()) < 20
    assert int((base == np.arange(10_000)).sum()) < 20


def test_a_permutation_looks_random() -> None:
    """Neighbours land far apart: the mean distance of a random order is a third of the size."""
    images = permute(np.arange(20_000), 20_000, 5, 2)
    distance = np.abs(np.diff(images)).mean() / 20_000
    assert 0.32 < distance < 0.345


@given(
    batch_size=st.integers(1, 200),
    world_size=st.integers(1, 32),
)
def test_ranks_share_the_slots(batch_size: int, world_size: int) -> None:
    """Contiguous parts that cover the batch, as even as can be."""
    parts = [rank_slots(batch_size, rank, world_size) for rank in range(world_size)]
    assert np.concatenate(parts).tolist() == list(range(batch_size))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
@pytest.mark.parametrize("grad_accum", [1, 3])
def test_the_global_order_does_not_depend_on_the_ranks(world_size: int, grad_accum: int) -> None:
    """Parts of all ranks, put together, are the batches of a single rank."""
    config = TrainerConfig(batch_size=8, grad_accum=grad_accum, seq_len=16)
    corpus = corpus_of(5000)
    alone = steps_of(DataOrder(config, corpus, rank=0, world_size=1), range(1, 60), grad_accum)
    ranks = [
        steps_of(DataOrder(config, corpus, rank=rank, world_size=world_size), range(1, 60), grad_accum)
        for rank in range(world_size)
    ]
    together = [np.concatenate(parts).tolist() for parts in zip(*ranks, strict=True)]
    assert together == [batch.tolist() for batch in alone]


def test_no_sample_is_lost_or_seen_twice_in_an_epoch() -> None:
    """Also when epochs do not end with a batch: the count of every sample differs by one at most."""
    config = TrainerConfig(batch_size=8, seq_len=16)
    order = DataOrder(config, corpus_of(3000), rank=0, world_size=1)
    assert order.num_samples % 8 != 0
    num_steps = 4 * order.num_samples // 8
    seen = np.concatenate(steps_of(order, range(1, num_steps + 1), 1))
    counts = np.bincount(seen, minlength=order.num_samples)
    assert counts.size == order.num_samples
    assert counts.max() - counts.min() <= 1


def test_a_step_is_the_whole_state() -> None:
    """Asking for a step again, or first, gives the same batch."""
    config = TrainerConfig(batch_size=4, seq_len=16)
    order = DataOrder(config, corpus_of(3000), rank=1, world_size=2)
    walked = [order.batch(step, 0).tokens for step in range(1, 30)]
    fresh = DataOrder(config, corpus_of(3000), rank=1, world_size=2)
    assert np.array_equal(fresh.batch(29, 0).tokens, walked[28])
    assert np.array_equal(order.batch(3, 0).tokens, walked[2])


def test_a_window_is_the_text_and_its_next_byte() -> None:
    """Sample i is bytes i * S to i * S + S, both ends included."""
    corpus = corpus_of(3000)
    batch = DataOrder(TrainerConfig(batch_size=4, seq_len=16), corpus, rank=0, world_size=1).batch(5, 0)
    assert batch.tokens.shape == (4, 17) and batch.tokens.dtype == np.int64
    for sample, window in zip(batch.samples, batch.tokens, strict=True):
        assert window.tolist() == corpus.data[sample * 16 : sample * 16 + 17].tolist()


def test_held_out_windows_are_never_trained() -> None:
    """Evaluation looks at text that no step has seen; every rank has its part."""
    config = TrainerConfig(batch_size=8, seq_len=16)
    orders = [DataOrder(config, corpus_of(3000), rank=rank, world_size=2) for rank in range(2)]
    held_out = np.concatenate([order.held_out().samples for order in orders])
    trained = np.concatenate([order.batch(step, 0).samples for order in orders for step in range(1, 100)])
    assert len(held_out) == 8
    assert set(held_out.tolist()).isdisjoint(trained.tolist())
    assert held_out.max() < orders[0].num_samples + orders[0].num_held_out


def test_the_smallest_corpus_works_and_a_smaller_one_is_refused() -> None:
    """One sample is enough; below that the message says how much is needed."""
    config = TrainerConfig(batch_size=3, seq_len=16)
    order = DataOrder(config, corpus_of(17), rank=0, world_size=1)
    assert order.batch(9, 0).samples.tolist() == [0, 0, 0]
    assert order.held_out().tokens.shape == (3, 17)
    with pytest.raises(UserError, match="needs at least 17"):
        DataOrder(config, corpus_of(16), rank=0, world_size=1)


def test_positions_may_span_epochs() -> None:
    """A batch at the seam takes the last samples of one epoch and the first of the next."""
    ids = sample_ids(np.arange(8, 12), 10, 0)
    assert ids[:2].tolist() == permute(np.array([8, 9]), 10, 0, 0).tolist()
    assert ids[2:].tolist() == permute(np.array([0, 1]), 10, 0, 1).tolist()
