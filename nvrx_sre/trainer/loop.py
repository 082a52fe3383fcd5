"""The training function of the reference trainer, and the call that runs it.

Model: a generation builds the sharded model, registers model, optimizer and progress, restores, and steps until
the configured end. Everything a step depends on is either restored or a function of the step (data order,
learning rate), so a step executed again gives the same bits on CPU with the same world.

The loss is scaled so that FSDP's mean over ranks is the mean over the global batch, also when the ranks' parts
differ in size. A loss that is not finite on this rank raises before the losses are reduced: the rank
that caused it is the one that reports it.

Process safety: collective. Must not: keep anything of a generation outside the training function; read
the environment; touch a group that the context did not form.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nvrx_sre.session import Context, resilient
from nvrx_sre.session.context import NonFiniteLoss
from nvrx_sre.trainer.config import TrainerConfig
from nvrx_sre.trainer.corpus import Corpus, load_corpus
from nvrx_sre.trainer.data import Batch, DataOrder
from nvrx_sre.trainer.digests import Progress, combined_samples_digest, state_digest
from nvrx_sre.trainer.model import build_model, build_optimizer, initialize, num_parameters, reshard

Results = dict[str, float | int | str | None]


class Generation:
    """Model, optimizer, data and progress of one generation on one rank."""

    def __init__(self, ctx: Context, config: TrainerConfig, corpus: Corpus) -> None:
        """Build and register everything; nothing is initialised yet. Collective."""
        self.ctx = ctx
        self.config = config
        self.corpus = corpus
        self.data = DataOrder(config, corpus, rank=ctx.rank, world_size=ctx.world_size)
        self.model = build_model(config.shape, ctx.device)
        self.optimizer = build_optimizer(self.model, config.peak_learning_rate)
        self.progress = Progress()
        ctx.track(model=self.model, optimizer=self.optimizer, progress=self.progress)

    def restore(self) -> None:
        """Load the newest common state, or initialise. Collective."""
        if self.ctx.restore() == 0:
            initialize(self.model, self.config.shape, self.config.seed)

    def run_step(self) -> None:
        """Execute and commit one optimizer step. Raises `NonFiniteLoss`, and then nothing is committed."""
        ctx, step = self.ctx, self.ctx.step + 1
        local_loss = self._accumulate(step)
        ctx.mark("optimizer")
        loss = self._mean_over_ranks(local_loss, step)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate_at(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.config.evaluate_every and step % self.config.evaluate_every == 0:
            self._evaluate()
        self.progress.add_loss(step, loss)
        ctx.commit(loss=loss, tokens=self.config.samples_per_step * self.config.seq_len)

    def _accumulate(self, step: int) -> Tensor:
        """Gradients of all micro-batches; this rank's share of the mean loss, 0-dim."""
        total = torch.zeros((), device=self.ctx.device)
        for micro_batch in range(self.config.grad_accum):
            with self.ctx.phase("data"):
                batch = self.data.batch(step, micro_batch)
                inputs, targets = self._to_device(batch)
            self.progress.add_samples(batch.positions, batch.samples)
            self.ctx.mark("forward")
            loss = self._summed_loss(inputs, targets) / self._num_targets(self.config.grad_accum)
            self.ctx.mark("backward")
            torch.autograd.backward(loss * self.ctx.world_size)
            total += loss.detach()
            self.ctx.tick()
        return total

    def _mean_over_ranks(self, local_loss: Tensor, step: int) -> float:
        if self.ctx.poisoned:
            local_loss = local_loss * math.nan
        if not math.isfinite(local_loss.item()):
            raise NonFiniteLoss(f"loss of step {step} is {local_loss.item()} on rank {self.ctx.rank}")
        self.ctx.mark("collective")
        dist.all_reduce(local_loss)
        return float(local_loss.item())

    def _evaluate(self) -> None:
        with self.ctx.phase("evaluate"), torch.no_grad():
            loss = self._summed_loss(*self._to_device(self.data.held_out())) / self._num_targets(1)
            dist.all_reduce(loss)
            self.progress.evaluation_loss = float(loss.item())
            reshard(self.model)

    def results(self) -> Results:
        """What came of it, JSON scalars. Collective."""
        return {
            "final_loss": self.progress.last_loss,
            "evaluation_loss": self.progress.evaluation_loss,
            "loss_digest": self.progress.loss_digest,
            "samples_digest": combined_samples_digest(self.progress, self.ctx.device),
            "state_digest": state_digest(self.model, self.optimizer, self.ctx.device),
            "unigram_entropy": self.corpus.unigram_entropy,
            "num_parameters": num_parameters(self.model),
            "corpus_bytes": int(self.corpus.data.size),
        }

    def _summed_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(inputs)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")

    def _num_targets(self, grad_accum: int) -> int:
        return self.config.batch_size * self.config.seq_len * grad_accum

    def _to_device(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Inputs and targets, `[b, S] int64` each."""
        tokens = torch.from_numpy(batch.tokens).to(self.ctx.device)
        return tokens[:, :-1], tokens[:, 1:]


def train(ctx: Context, config: TrainerConfig, corpus: Corpus) -> Results:
    """One generation of the run: from forming the group to the last step. Collective; blocks until the end."""
    make_deterministic(ctx.device)
    ctx.init_process_group()
    generation = Generation(ctx, config, corpus)
    generation.restore()
    while ctx.step < config.steps:
        generation.run_step()
    results = generation.results()
    ctx.finish(**results)
    return results


def make_deterministic(device: torch.device) -> None:
    """Same inputs, same bits. On CPU only: there one thread a rank fixes the order of every sum."""
    if device.type == "cpu":
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)


def run(config: TrainerConfig) -> Results | None:
    """Train with the launcher around this process, or alone without one. Blocks until the run has ended.

    The results where there is no launcher to tell them to. Raises `UserError` if the data cannot be used.
    """
    corpus = load_corpus(config.data)  # before the resilient call: a standby has it loaded when it is needed
    corpus.check_length(config.seq_len)
    return resilient(train)(config, corpus)
