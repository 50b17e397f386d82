"""Training of a compressed model's small tensors towards the original's predictions, end to end.

Loss: KL divergence of the model's predictions from the original's, mean over all tokens of a batch, and so many times
that of its routing, as in Router KD (arXiv:2603.02217). Adam (Kingma and
Ba, arXiv:1412.6980) moves fp32 copies; the model always computes with these as they would be stored, so that what is
measured is what is written. Held-out windows decide: of the values at each evaluation those with the least divergence
are kept, among those that lose no more than the input on any kind of text.
"""

import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import get_cosine_schedule_with_warmup

from moetool.errors import VerificationError
from moetool.format.kinds.moefied import CENTRE, is_selector
from moetool.job.interrupt import Interrupt
from moetool.job.progress import Progress, phase
from moetool.measure.results import KL_ROUNDING, NAT_UNIT, shown_kl
from moetool.numerics.seeding import generator
from moetool.repair.costs import REPAIR, has_low_rank
from moetool.repair.options import RANK, RepairOptions, Trained
from moetool.repair.routing import routing_divergence
from moetool.repair.teacher import NotedFile
from moetool.repair.texts import Texts
from moetool.repair.trainee import Trainee
from moetool.runtime.modules.experts import SharedBaseExperts
from moetool.runtime.modules.insertion import is_placeholder
from moetool.runtime.modules.neuron_experts import NeuronExperts
from moetool.runtime.modules.quantized_in_model import quantized_modules
from moetool.runtime.modules.routers import Routers, trained_routers
from moetool.training.masters import LowRankUpdate
from moetool.training.weights import ModelWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BETAS = 0.9, 0.99
_CLIP = 1.0  # norm of the gradient of all trained numbers, each relative to the root mean square of its tensor
_WORSE = 1.5  # times the input's divergence at an evaluation, with nothing better so far: the rate is too high
_SLOWER = 0.25  # times the rate that was too high
_SLOWDOWNS = 2  # at most


@dataclass(frozen=True)
class RepairOutcome:
    """Outcome of a repair's training: values to store, and divergences before and after.

    Attributes:
        values: of the masters, by name of their parameters.
        step: after which these were reached; 0 for the input's own.
        before, after: nats per token on held-out windows, by kind of text.
        stopped: why it ended early, if it did.
        rate: the learning rate at the end.
        curve: of evaluations.
        seconds: that it took.
    """

    values: Mapping[str, Tensor]
    step: int
    before: Mapping[str, float]
    after: Mapping[str, float]
    stopped: str | None
    rate: float
    curve: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0


class Distilling:
    """One training of a model, in which `noted` has the original's predictions of all `texts`."""

    def __init__(
        self,
        trainee: Trainee,
        texts: Texts,
        noted: NotedFile,
        options: RepairOptions,
        *,
        slows: bool,
    ) -> None:
        """With `slows`, a rate that proves too high is lowered."""
        assert options.learning_rate is not None, "the stage settles what options leave open"
        self._trainee, self._masters, self._options = trainee, trainee.masters, options
        self._texts, self._noted = texts, noted
        self._device, self._routers = trainee.model.device, Routers(trainee.model)
        self._numbers = [master.numbers for master in self._masters.values()]
        self._slowdowns = _SLOWDOWNS if slows else 0
        self._begin(options.learning_rate, options.steps)

    def _begin(self, rate: float, steps: int) -> None:
        """Set out from the values that there are, with so many steps to go."""
        self._rate = rate
        group = {"params": self._numbers, "initial_lr": rate}
        self._optimizer = torch.optim.Adam([group], lr=rate, betas=_BETAS, eps=1e-12)
        # From epoch 0, and to one after the last: no step is lost to a rate of zero.
        rising = math.ceil(self._options.warmup * steps)
        self._schedule = get_cosine_schedule_with_warmup(self._optimizer, rising, steps + 1, last_epoch=0)

    def run(self, progress: Progress, interrupt: Interrupt) -> RepairOutcome:
        """Train, and leave in the model the values with the least divergence on held-out windows that made no text
        worse."""
        options, began = self._options, time.monotonic()
        steps, stopped = options.steps, None
        due = {math.ceil(steps * part / options.evaluations) for part in range(1, options.evaluations + 1)}
        with phase(progress, REPAIR, steps, "steps"):
            before = self._divergences()
            if not all(map(math.isfinite, before.values())):
                raise VerificationError(
                    f"The input's divergence from the original is {_said(before)}, before anything has changed: its "
                    "weights are damaged, and `moetool verify` names them."
                )
            progress.log(f"Held out, before: {_said(before)}.")
            best, curve = (0, before, self._values()), [{"step": 0.0, **before}]
            batches = self._batches()
            for step in range(1, steps + 1):
                interrupt.check()
                loss, failed = self._step(next(batches)), ""
                progress.advance()
                if not math.isfinite(loss):
                    failed = f"the loss is {loss} at step {step}"
                elif step in due:
                    now = self._divergences()
                    curve.append({"step": float(step), **now})
                    progress.log(f"step {step}: held out {_said(now)}.")
                    if all(now[name] <= before[name] for name in before) and sum(now.values()) < sum(best[1].values()):
                        best = step, now, self._values()
                    elif not best[0] and not all(
                        now[name] < max(_WORSE * before[name], KL_ROUNDING) for name in before
                    ):
                        failed = f"at step {step} held-out divergence has risen: {_moved(before, now)}"
                if not failed:
                    continue
                if best[0] or not self._slowdowns or step == steps:
                    stopped = failed
                    break
                self._set(best[2])
                self._begin(self._rate * _SLOWER, steps - step)
                self._slowdowns -= 1
                progress.log(
                    f"{failed[0].upper()}{failed[1:]}. Again from the input's values, with --learning-rate "
                    f"{self._rate:g} for what is left of the {steps} steps."
                )
        self._set(best[2])
        if stopped is not None:
            progress.log(f"Stopped: {stopped}. A smaller --learning-rate would be steadier.")
        if not best[0]:
            progress.log("No step made a held-out text better and none worse: the input's values are kept.")
        seconds = round(time.monotonic() - began, 2)
        return RepairOutcome(best[2], best[0], before, best[1], stopped, self._rate, curve, seconds)

    def _set(self, values: Mapping[str, Tensor]) -> None:
        for name, master in self._masters.items():
            master.set(values[name])

    def _batches(self) -> Iterator[list[int]]:
        """Numbers of windows, each once before any comes again."""
        stream, waiting = generator(self._options.seed, "repair"), list[int]()
        while True:
            while len(waiting) < self._options.batch_size:
                waiting += torch.randperm(len(self._texts.trained), generator=stream).tolist()
            yield waiting[: self._options.batch_size]
            del waiting[: self._options.batch_size]

    def _step(self, numbers: list[int]) -> float:
        """One step on windows of these numbers; returns the loss before it, and takes none where that is no number."""
        noted = self._noted.of(numbers).to(self._device)
        with self._routers.watched():
            loss = noted.divergence(self._trainee.logits(self._texts.trained[numbers])).mean()
        if noted.routing is not None:
            loss = loss + (self._options.routing or 0.0) * routing_divergence(self._routers.logits, noted.routing)
        self._routers.clear()
        if not torch.isfinite(loss):
            return loss.item()
        self._optimizer.zero_grad()
        loss.backward()
        for master in self._masters.values():
            master.take_gradient()
        norm = nn.utils.clip_grad_norm_(self._numbers, _CLIP)
        if not torch.isfinite(norm):
            return math.nan
        self._optimizer.step()
        self._schedule.step()
        for master in self._masters.values():
            master.give()
        return loss.item()

    @torch.no_grad()
    def _divergences(self) -> dict[str, float]:
        """Nats per token on the held-out windows, by kind of text."""
        first, found, size = len(self._texts.trained), {}, self._options.batch_size
        for name, windows in self._texts.held_out.items():
            total = 0.0
            for start in range(0, len(windows), size):
                batch = windows[start : start + size]
                noted = self._noted.windows(first + start, first + start + len(batch)).to(self._device)
                total += noted.divergence(self._trainee.logits(batch)).sum(dtype=torch.float64).item()
            found[name], first = total / windows.numel(), first + len(windows)
        return found

    def _values(self) -> dict[str, Tensor]:
        return {name: master.values for name, master in self._masters.items()}


def _said(divergences: Mapping[str, float]) -> str:
    return ", ".join(f"{shown_kl(nats)} on {name}" for name, nats in divergences.items()) + f", in {NAT_UNIT}"


def _moved(before: Mapping[str, float], now: Mapping[str, float]) -> str:
    moved = (f"{shown_kl(nats)} → {shown_kl(now[name])} on {name}" for name, nats in before.items())
    return f"{', '.join(moved)}, in {NAT_UNIT}"


def choose(model: "PreTrainedModel", trains: Trained) -> dict[str, Tensor]:
    """Let only what costs no byte require gradients: routers; with `small` also norms, biases, scales of codes,
    low-rank factors, shared bases and representative values of neurons; with `lora` also all others to which `low_rank`
    adds nothing; with `all` attention and experts that are stored in full, too. Embeddings, head and networks that
    select neurons never do.

    Returns:
        The trained parameters and buffers by their names in memory.
    """
    chosen = _numbers_of(trained_routers(model))
    ends = [module.weight for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module]
    model.requires_grad_(False)
    found = dict[str, Tensor]()
    if trains != "routers":
        chosen |= _numbers_of(module.stored for _, module in quantized_modules(model))
        for name, module in model.named_modules():
            if isinstance(module, SharedBaseExperts):
                chosen |= {id(parameter) for parameter in (*module.moetool.parameters(), *module.base_parameters())}
            elif isinstance(module, NeuronExperts):
                found[f"{name}.{CENTRE}"] = module.centre.requires_grad_(True)
    for name, parameter in model.named_parameters():
        if is_placeholder(parameter) or not parameter.is_floating_point() or is_selector(name):
            continue
        vector = trains != "routers" and parameter.dim() == 1
        whole = trains == "all" or (trains == "lora" and not _has_rank(name, parameter))
        whole = whole and not any(parameter is end for end in ends)
        if id(parameter) in chosen or vector or whole:
            parameter.requires_grad_(True)
            found[name] = parameter
    return found


def low_rank(
    weights: ModelWeights, others: Collection[str], stored: torch.dtype, seed: int
) -> dict[str, LowRankUpdate]:
    """What is added to matrices in a model's layers that are stored in full, by name of these.

    Args:
        weights: of the model.
        others: names of what is trained itself.
        stored: the dtype in which most matrices are stored.
        seed: of the random halves.
    """
    found = dict[str, LowRankUpdate]()
    for index, path in enumerate(weights.paths):
        with weights.opened(index):
            for inside, weight in weights.layer(index).named_parameters():
                name = f"{path}.{inside}"
                if name not in others and weight.is_floating_point() and _has_rank(name, weight):
                    found[name] = LowRankUpdate.of(weight, RANK, stored, generator(seed, "low rank", name))
    return found


def _has_rank(name: str, tensor: Tensor) -> bool:
    """Whether a low-rank product is added to a tensor, which is no bias, selector or placeholder."""
    return (
        has_low_rank(tensor.shape)
        and not name.endswith("bias")
        and not is_placeholder(tensor)
        and not is_selector(name)
    )


def _numbers_of(modules: Iterable[nn.Module]) -> set[int]:
    return {id(parameter) for module in modules for parameter in module.parameters()}
