"""transformers' Trainer with router losses, mask constraints and gradient checks of MoE models."""

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import Sampler
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_NAME, ModelOutput

from moetool.checkpoint.files import fast_digest, is_intact, write_json
from moetool.checkpoint.permissions import open_to_readers
from moetool.errors import VerificationError
from moetool.job.job import Job
from moetool.kernels.rounding import exact_products
from moetool.numerics.seeding import generator
from moetool.runtime.modules.routers import Routers
from moetool.runtime.modules.simoe_mixing import Interpolation
from moetool.tune.balance import balance_of, z_of
from moetool.tune.bias_balance import BiasBalance, choice_biases
from moetool.tune.examples import IGNORED, Example, collate
from moetool.tune.masks import MaskConstraint
from moetool.tune.rates import set_rate_of_scales
from moetool.tune.teacher import Teacher

DIGESTS = "digests.json"  # of a checkpoint's files
LOGGED = {  # by the Trainer's name: what a line of log calls it
    "loss": "loss",
    "eval_loss": "held-out loss",
    "teacher_kl": "KL from the teacher",
    "balance_loss": "balance loss",
    "z_loss": "z-loss",
    "mask_sparsity": "mask sparsity",
    "multiplier": "multiplier",
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
}


class MoETrainer(Trainer):
    """Loss: next tokens of the answers, or in part the divergence from a teacher's predictions of them, averaged over
    the answer tokens of the whole step, plus the router losses, averaged over its batches.
    """

    def __init__(
        self,
        *,
        routers: Routers,
        top_k: int,
        balance: float,
        z: float,
        interpolation: Interpolation | None,
        constraint: MaskConstraint | None,
        bias_balance: BiasBalance | None,
        teacher: Teacher | None,
        scales_times: float,
        **options: object,
    ) -> None:
        super().__init__(**options)
        self.routers, self.top_k, self.balance, self.z = routers, top_k, balance, z
        self.interpolation, self.constraint, self.teacher = interpolation, constraint, teacher
        self.bias_balance, self._scales_times = bias_balance, scales_times
        for callback in (constraint, bias_balance):
            if callback is not None:
                self.add_callback(callback)
        self.model_accepts_loss_kwargs = True
        self.is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        self._told: dict[str, list[float]] = {}
        self._evaluated: tuple[int, dict[str, float]] | None = None

    def compute_loss(
        self,
        model: PreTrainedModel,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, ModelOutput]:
        given, labels, real = self._split(inputs)
        with self.routers.watched():
            outputs = model(**given, use_cache=False)
        targets = labels[:, 1:].flatten()
        summed = F.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1).float(), targets, ignore_index=IGNORED, reduction="sum"
        )
        answers = (targets != IGNORED).sum()
        if self.teacher is not None:
            apart = self.teacher.divergence(given, outputs.logits, labels[:, 1:] != IGNORED)
            self._tell("teacher_kl", apart * self.accelerator.num_processes / self._summed(answers).clamp_min(1))
            summed = (1 - self.teacher.share) * summed + self.teacher.share * apart
        if num_items_in_batch is None:
            loss = summed / answers.clamp_min(1)
        else:
            # The count is that of all processes, whose gradients are averaged.
            loss = summed / num_items_in_batch * self.accelerator.num_processes
        if len(self.routers):
            loss = loss + self._router_losses(real.flatten()) / self.current_gradient_accumulation_steps
        if self.bias_balance is not None:
            self.bias_balance.count(real.flatten(), self._summed)
        if self.constraint is not None:
            loss = loss + self.constraint.loss() / self.current_gradient_accumulation_steps
        self.routers.clear()
        self._require_finite(self.accelerator.reduce(loss.detach(), "sum"))  # of all processes, or one would wait
        return (loss, outputs) if return_outputs else loss

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """The Trainer's own, in which scales of codes have rates of their own."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new:
            set_rate_of_scales(optimizer, self.model if model is None else model, self._scales_times)
        return optimizer

    def _split(self, batch: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """What the model takes of a batch, the labels, and which tokens are real."""
        inputs = dict(batch)
        ends = inputs.pop("prompt_ends")
        if self.interpolation is not None:
            self.interpolation.prompt_ends = ends
        return inputs, inputs.pop("labels"), inputs.pop("real")

    def _get_train_sampler(self, train_dataset: Sized | None = None) -> Sampler[int]:
        rows = len(train_dataset if train_dataset is not None else self.train_dataset) - 1
        together = self.args.per_device_train_batch_size * self.args.world_size
        return SeededOrder(rows, self.args.seed, -rows % together if self.args.world_size > 1 else 0)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """A checkpoint of the training: what is trained, under the names that it has in memory.

        Under the names of the hub, in which transformers saves, its Trainer does not find experts again when it
        resumes, and goes on with those that it began with. What is not trained is in the source.
        """
        directory = Path(output_dir or self.args.output_dir)
        directory.mkdir(parents=True, exist_ok=True)
        if self.is_sharded or not self.args.should_save:  # parts of a model are written and found again beside this
            return
        model = self.accelerator.unwrap_model(self.model)
        changed = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        if self.constraint is not None:
            changed |= {name for name, _ in model.named_buffers() if name.endswith(".multiplier")}
        if self.bias_balance is not None:
            changed |= choice_biases(model).keys()
        state = model.state_dict() if state_dict is None else state_dict
        tensors = {name: state[name].detach().cpu().contiguous() for name in sorted(changed)}
        save_file(tensors, directory / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
        open_to_readers(directory / SAFE_WEIGHTS_NAME)
        torch.save(self.args, directory / "training_args.bin")

    def restore(self, checkpoint: Path, steps: int) -> None:
        """Put the weights of a training's last checkpoint, that of step `steps`, in their place."""
        if self.is_sharded:
            self._prepare_for_training(steps, None, str(checkpoint))
        else:
            self._load_from_checkpoint(str(checkpoint))

    def _prepare_for_training(self, *arguments: object) -> object:
        model, batches = super()._prepare_for_training(*arguments)
        if isinstance(model, FSDPModule):
            model.set_reduce_scatter_unused_params(True)  # some process may give an expert no token
        return model, batches

    @torch.no_grad()
    @exact_products()
    def evaluate(self, eval_dataset: object = None, *_: object, **__: object) -> dict[str, float]:
        """Mean next-token loss over all answer tokens of a data set, however it is cut into batches and processes.

        Asked again at the same step, which happens where it ends an epoch or the training, it only says so again.
        """
        if self._evaluated is not None and self._evaluated[0] == self.state.global_step:
            return self._evaluated[1]
        model = self.model_wrapped
        model.eval()
        total = torch.zeros(2, dtype=torch.float64)
        for batch in self.get_eval_dataloader(eval_dataset):
            # What fills up the last batch of some process does not count.
            total += self.accelerator.gather_for_metrics(self._losses(batch)).sum(0).cpu()
        model.train()
        found = {"eval_loss": (total[0] / total[1]).item()}
        self._evaluated = self.state.global_step, dict(found)
        self.log(found)
        return found

    def _losses(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Sum of the next-token losses of each row of a batch, and number of its answer tokens: `[rows, 2]`."""
        given, labels, _real = self._split(self._prepare_inputs(batch))
        logits = self.model_wrapped(**given, use_cache=False).logits[:, :-1].float()
        losses = F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], ignore_index=IGNORED, reduction="none")
        return torch.stack([losses.double().sum(1), (labels[:, 1:] != IGNORED).double().sum(1)], dim=1)

    @torch.no_grad()
    def check_end(self, row: Sequence[Example]) -> None:
        """Raise `VerificationError` if the loss of a row is not a number after the last step, which nobody has seen."""
        self.model_wrapped.eval()
        total = self.accelerator.reduce(self._losses(collate([row])).sum(0), "sum")
        self.model_wrapped.train()
        if not torch.isfinite(total[0]):
            raise VerificationError(
                f"The loss is {total[0].item()} after the last step: --learning-rate is far too large. Start again "
                "with --overwrite."
            )

    def forget_evaluation(self) -> None:
        """Evaluate anew when asked again at the same step: the model has got other weights since."""
        self._evaluated = None

    def _require_finite(self, loss: Tensor) -> None:
        if not torch.isfinite(loss):
            step = self.state.global_step
            if step == 0:
                raise VerificationError(
                    f"The loss is {loss.item()} at step 0, before anything has changed: weights are damaged, and "
                    "`moetool verify` names them, or too large for --bf16."
                )
            if step == 1:
                raise VerificationError(
                    f"The loss is {loss.item()} after the first step: its gradients overflow, because weights are "
                    "damaged or scaled, or --learning-rate is far too large. Start again with --overwrite."
                )
            raise VerificationError(
                f"The loss is {loss.item()} at step {step}. The last checkpoint before it is kept and --resume starts "
                "from there; a smaller --learning-rate needs a new start with --overwrite."
            )

    def _router_losses(self, real: Tensor) -> Tensor:
        balance = balance_of(self.routers, self.top_k, real, self._summed)
        z = z_of(self.routers, real, self._summed)
        self._tell("balance_loss", balance)
        self._tell("z_loss", z)
        return self.balance * balance + self.z * z

    def _summed(self, tensor: Tensor) -> Tensor:
        return self.accelerator.reduce(tensor, "sum")

    def _tell(self, name: str, value: Tensor) -> None:
        """Keep a value for the log: the mean over processes."""
        self._told.setdefault(name, []).append(self.accelerator.reduce(value.detach(), "mean").item())

    def log(self, logs: dict[str, float], *arguments: object, **options: object) -> None:
        """Log a step with the means of its router losses since the last time anything was logged."""
        if "loss" in logs:
            logs |= {name: round(sum(values) / len(values), 6) for name, values in self._told.items() if values}
            logs |= {} if self.constraint is None else self.constraint.logs()
            self._told.clear()
        super().log(logs, *arguments, **options)


class SeededOrder(Sampler[int]):
    """Every index once, in an order that follows from seed and epoch alone, however many processes share the work.

    Several processes take equal numbers of batches of equal size. What is missing at the end of an epoch is filled up
    with the index after the last, which is that of a row without tokens: accelerate would take rows a second time.
    """

    def __init__(self, count: int, seed: int, missing: int = 0) -> None:
        self._count, self._seed, self._missing, self._epoch = count, seed, missing, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the order of examples is drawn from; the Trainer calls it before each."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self._count, generator=generator(self._seed, "order", self._epoch)).tolist()
        return iter(order + [self._count] * self._missing)

    def __len__(self) -> int:
        return self._count + self._missing


class Reporter(TrainerCallback):
    """Trainer callback that reports steps and logged values to the job, and stops the training when a stop was asked
    for."""

    def __init__(self, job: Job[Any]) -> None:
        self._job = job

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self._job.progress.advance()
        control.should_log |= state.global_step == state.max_steps
        if self._job.ranks.is_stopping(self._job.interrupt.requested):
            self._job.interrupt.requested = True  # maybe another process was asked
            control.should_save = True
            control.should_training_stop = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """The checkpoint is there: note what its files hold, and only then let go of the one before it."""
        self._job.ranks.barrier()  # other processes have written parts of it
        if state.is_world_process_zero:
            directory = Path(args.output_dir)
            last = directory / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            files = sorted(path for path in last.rglob("*") if path.is_file())
            write_json(last / DIGESTS, {path.relative_to(last).as_posix(): fast_digest(path) for path in files})
            for other in directory.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
                if other != last:
                    shutil.rmtree(other)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **_: object,
    ) -> None:
        logged = logs or {}
        values = ", ".join(f"{words} {float(logged[name]):.4g}" for name, words in LOGGED.items() if name in logged)
        if values:
            self._job.progress.log(f"step {state.global_step}: {values}")


@torch.no_grad()
@exact_products()
def keeps_apart(model: PreTrainedModel) -> bool:
    """Whether examples that share a row do not see each other, as far as a try can tell: not every family's attention
    heeds positions that begin anew."""
    model.eval()
    vocabulary = int(model.config.get_text_config().vocab_size)
    second = torch.arange(1, 7) % vocabulary
    positions = torch.cat([torch.arange(6), torch.arange(6)])[None]
    seen = []
    for first in (torch.arange(7, 13) % vocabulary, torch.arange(40, 46) % vocabulary):
        row = torch.cat([first, second])[None].to(model.device)
        with torch.autocast(model.device.type, model.dtype, enabled=model.dtype is not torch.float32):
            logits = model(input_ids=row, position_ids=positions.to(model.device), use_cache=False).logits
        seen.append(logits[0, 6:].float())
    model.train()
    return bool((seen[0] - seen[1]).norm() < 1e-3 * seen[0].norm())


def last_checkpoint(directory: Path) -> tuple[Path | None, int]:
    """The newest checkpoint of a training that is complete and as it was written, and its step; removes newer ones."""
    found = [(int(path.name.rpartition("-")[2]), path) for path in directory.glob(f"{PREFIX_CHECKPOINT_DIR}-*")]
    for step, path in sorted(found, reverse=True):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            noted = json.loads((path / DIGESTS).read_bytes())  # which is written last
            if noted and all(is_intact(path / name, str(digest)) for name, digest in noted.items()):
                return path, step
        shutil.rmtree(path)
    return None, 0


def recompute_activations(model: PreTrainedModel) -> None:
    """Keep only what enters each layer, and run it again on the way back."""
    newer = getattr(model, "activation_checkpointing_enable", None)  # what transformers 5.23 calls it
    (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})
