"""The exact data order: which sample of the corpus stands in which slot of which step.

Model: the corpus is cut into windows of `seq_len` bytes. Position p = (step - 1) * samples per step + slot runs
on for ever; epoch e = p // N visits every training window exactly once, in the order of a permutation that is
keyed by (seed, e). A rank takes a contiguous part of each micro-batch's slots.

Invariants: the order over all ranks depends on (seed, step, slot) alone, never on the number of ranks; within
an epoch no window is lost or seen twice; the whole state of the data is the step. Windows at the end of the
corpus are held out for evaluation. Thread safety: immutable. Must not: keep a position of its own, load torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nvrx_sre.trainer.config import TrainerConfig
from nvrx_sre.trainer.corpus import Corpus

Indices = npt.NDArray[np.int64]

HELD_OUT_WINDOWS_MAX = 256
_ROUNDS = 6
_U64 = np.uint64
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class Batch:
    """One rank's part of a micro-batch: positions `[b] int64`, sample ids `[b] int64`, bytes `[b, S + 1] int64`."""

    positions: Indices
    samples: Indices
    tokens: Indices


class DataOrder:
    """Batches of one rank, as a pure function of the step."""

    def __init__(self, config: TrainerConfig, corpus: Corpus, *, rank: int, world_size: int) -> None:
        """Raises `UserError` if the corpus is shorter than a sample or the ranks outnumber the micro-batch."""
        corpus.check_length(config.seq_len)
        config.check_world(world_size)
        num_windows = (corpus.data.size - 1) // config.seq_len
        self.num_held_out = min(HELD_OUT_WINDOWS_MAX, num_windows // 10)
        self.num_samples = num_windows - self.num_held_out
        self._config = config
        self._data = corpus.data
        self._slots = rank_slots(config.batch_size, rank, world_size)

    def batch(self, step: int, micro_batch: int) -> Batch:
        """Part of micro-batch `micro_batch` (from 0) of `step` (from 1) that belongs to this rank."""
        first = (step - 1) * self._config.samples_per_step + micro_batch * self._config.batch_size
        positions = first + self._slots
        samples = sample_ids(positions, self.num_samples, self._config.seed)
        return Batch(positions, samples, self._windows(samples))

    def held_out(self) -> Batch:
        """This rank's part of the one evaluation batch: held-out windows, or the last one of a tiny corpus."""
        count = max(1, self.num_held_out)
        last = self.num_samples + self.num_held_out - 1
        samples = last - self._slots % count
        return Batch(self._slots, samples, self._windows(samples))

    def _windows(self, samples: Indices) -> Indices:
        length = self._config.seq_len
        offsets = samples[:, None] * length + np.arange(length + 1)
        windows: Indices = self._data[offsets].astype(np.int64)
        return windows


def rank_slots(batch_size: int, rank: int, world_size: int) -> Indices:
    """Slots `[b] int64` of a micro-batch that are `rank`'s: contiguous and disjoint; sizes differ by 1 at most."""
    return np.arange(batch_size * rank // world_size, batch_size * (rank + 1) // world_size, dtype=np.int64)


def sample_ids(positions: Indices, num_samples: int, seed: int) -> Indices:
    """Sample at each of the positions `[b] int64`; every `num_samples` positions are one epoch, a permutation."""
    epochs, offsets = np.divmod(positions, num_samples)
    ids = np.empty_like(positions)
    for epoch in sorted(set(epochs.tolist())):  # np.unique would import numpy.ma in the first step of a process
        chosen = epochs == epoch
        ids[chosen] = permute(offsets[chosen], num_samples, seed, epoch)
    return ids


def permute(values: Indices, size: int, seed: int, epoch: int) -> Indices:
    """Image of `values` (each in 0..size-1) under the permutation of 0..size-1 keyed by (seed, epoch).

    A Feistel network over the next even power of two, walked until it lands inside. It needs no table, so the
    order of a corpus of any size costs nothing to hold and any step can be asked for directly.
    """
    half_bits = max(1, (max(1, size - 1).bit_length() + 1) // 2)
    keys = [_mix(_mix(seed * 0x9E3779B97F4A7C15 + epoch) + number) for number in range(_ROUNDS)]
    result = _feistel(values.astype(_U64), half_bits, keys)
    outside = result >= size
    while outside.any():  # a permutation's cycle leads back inside; less than 4 turns on average
        result[outside] = _feistel(result[outside], half_bits, keys)
        outside = result >= size
    return result.astype(np.int64)


def _feistel(values: npt.NDArray[np.uint64], half_bits: int, keys: list[int]) -> npt.NDArray[np.uint64]:
    mask = _U64((1 << half_bits) - 1)
    shift = _U64(half_bits)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (mix64(right ^ _U64(key)) & mask)
    return (left << shift) | right


def mix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of splitmix64 on each element (Steele, Lea, Flood 2014); wraps modulo 2**64."""
    values = (values ^ (values >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> _U64(27))) * _U64(0x94D049BB133111EB)
    return values ^ (values >> _U64(31))


def _mix(value: int) -> int:
    return int(mix64(np.array([(value + 0x9E3779B97F4A7C15) & _MASK64], dtype=_U64))[0])
