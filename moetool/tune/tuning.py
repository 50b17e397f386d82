"""One training by transformers' Trainer: from a model and examples to a model that has learnt them."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import TrainingArguments, get_scheduler
from transformers.trainer_callback import PrinterCallback

from moetool.job.job import Job
from moetool.job.processes import check_processes, processes, sharding
from moetool.job.progress import phase
from moetool.job.workspace import TRAINER
from moetool.quiet import quiet
from moetool.runtime.modules.batch_dependence import BATCH_DEPENDENT, depends_on_batch
from moetool.runtime.modules.experts import SharedBaseExperts
from moetool.runtime.modules.insertion import experts_per_token
from moetool.runtime.modules.networks import SplitFFN
from moetool.runtime.modules.routers import Routers, trained_routers
from moetool.runtime.modules.simoe_mixing import interpolation_of
from moetool.tune.bias_balance import BiasBalance
from moetool.tune.costs import EVALUATION, TRAIN
from moetool.tune.examples import Example, collate, pack
from moetool.tune.lora import merge_lora
from moetool.tune.masks import WAY, MaskConstraint, parameter_groups
from moetool.tune.options import TuneOptions
from moetool.tune.rates import peak_rate
from moetool.tune.results import Training
from moetool.tune.teacher import Teacher
from moetool.tune.trainer import LOGGED, MoETrainer, Reporter, keeps_apart, last_checkpoint, recompute_activations

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def train(
    job: Job[Any],
    model: "PreTrainedModel",
    options: TuneOptions,
    examples: Sequence[Example],
    held_out: Sequence[Example] | None,
    teacher: Teacher | None = None,
    settle: Callable[[], bool] = lambda: False,
) -> tuple[Training, dict[str, Tensor] | None]:
    """Train what requires gradients, or go on where an interrupted run stopped. Factors are then merged and quantized
    layers exact again, and `settle` rounds weights as they are stored and tells whether it has, if this process has the
    whole model: so what is evaluated in the end is what is written.

    Returns:
        What is worth telling, and the weights by their names in memory where the model that was given has them in parts
        (of the first process; others get none).

    Raises:
        VerificationError: the loss is not a number.
    """
    work = job.work / TRAINER
    if sharding() == "FSDP 2":
        for module in model.modules():
            if isinstance(module, SharedBaseExperts):
                module.flatten_bases()
            if isinstance(module, SplitFFN):
                module.lie_by_rows(for_good=True)
    if depends_on_batch(model):
        job.progress.log(BATCH_DEPENDENT)
    packs = options.packing and keeps_apart(model)
    if teacher is not None:
        packs = packs and keeps_apart(teacher.model)
        teacher.model.eval()
    if options.packing and not packs:
        job.progress.log("In this family examples that share a row would see each other: each gets its own.")
    rows = pack(examples, options.sequence_length) if packs else [[example] for example in examples]
    batches = math.ceil(len(rows) / (options.batch_size * processes()))
    steps = options.steps or math.ceil(math.ceil(batches / options.accumulation) * options.epochs)
    if options.gradient_checkpointing and options.train != "lora":  # which does so by itself
        recompute_activations(model)
    constraint, routers, moved = _constraint(model, options, steps), Routers(model), options.balance_bias
    rate = peak_rate(model, options)
    if options.balance_weight and trained_routers(model) - routers.modules:
        job.progress.log("This family's routers do not tell what they decide: nothing balances the load of experts.")
    job.ranks.barrier(job.interrupt.check)  # who waits for others in the Trainer waits until they come
    with quiet():
        on_cpu = job.device.type == "cpu"
        arguments = _arguments(str(work), options, steps, rate, on_cpu=on_cpu, evaluates=bool(held_out))
        with arguments.main_process_first(local=False):
            last, done = last_checkpoint(work)
        arguments.eval_on_start = bool(held_out) and not done
        began = time.monotonic()
        with phase(job.progress, TRAIN, steps - done, "steps"):
            trainer = MoETrainer(
                model=model,
                args=arguments,
                train_dataset=[*rows, []],  # the last for the end of an epoch, see `SeededOrder`
                eval_dataset=[[example] for example in held_out] if held_out else None,
                data_collator=collate,
                callbacks=[Reporter(job)],
                optimizers=_optimizers(model, options, steps, rate),
                routers=routers,
                top_k=experts_per_token(model),
                balance=options.balance_weight,
                bias_balance=None if moved is None else BiasBalance(model, routers, moved),
                z=options.z,
                interpolation=interpolation_of(model),
                constraint=constraint,
                teacher=teacher,
                scales_times=options.scales_times,
            )
            check_processes(trainer.accelerator.num_processes)
            trainer.remove_callback(PrinterCallback)
            if (tool := sharding()) and not trainer.is_sharded:
                job.progress.log(f"accelerate does not use {tool} here: every process holds the whole model.")
            if done < steps:
                trainer.train(resume_from_checkpoint=str(last) if last else None)
            elif last is not None:  # stopped after the last step; the Trainer would go one further
                trainer.restore(last, steps)
            job.interrupt.check()
            trainer.check_end(rows[0])
        if not trainer.is_sharded and (options.quantize_base != "none" or options.lora_rank is not None):
            merge_lora(model, job.source.checkpoint)
            trainer.forget_evaluation()
        found = Training(steps=steps, training_seconds=round(time.monotonic() - began, 2))
        if held_out:
            if not trainer.is_sharded and settle():
                trainer.forget_evaluation()
            with phase(job.progress, EVALUATION):
                loss = trainer.evaluate()["eval_loss"]
            perplexity = round(math.exp(min(loss, 700)), 4)
            found = replace(found, eval_loss=round(loss, 6), eval_perplexity=perplexity)
        if done < steps:
            curve = _curve(trainer.state.log_history)
            before = next((point.get("eval_loss") for point in curve if point["step"] == 0), None)
            found = replace(found, curve=curve, eval_loss_before=before)
        if constraint is not None:
            masks = constraint.logs()
            found = replace(found, mask_sparsity=masks["mask_sparsity"], multiplier=masks["multiplier"])
            if found.multiplier:
                job.progress.log(
                    f"Masks closed {found.mask_sparsity:.1%} of their elements, not the {constraint.target:.1%} "
                    "asked for: more --steps, or a higher --multiplier-rate, would."
                )
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped) if trainer.is_sharded else None
    job.ranks.close()
    return found, weights


def _curve(history: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """The entries of every step that was logged: training and evaluation losses together."""
    points: dict[float, dict[str, float]] = {}
    for entry in history:
        if logged := {name: float(entry[name]) for name in LOGGED if name in entry}:
            points.setdefault(entry["step"], {"step": entry["step"]}).update(logged)
    return list(points.values())


def _constraint(model: "PreTrainedModel", options: TuneOptions, steps: int) -> MaskConstraint | None:
    interpolation = interpolation_of(model)
    if interpolation is None or not interpolation.trains_masks:
        return None
    interpolation.samples = options.sample_masks
    return MaskConstraint(model, interpolation.sparsity, mask_rates(options, steps)[1], options.overlap)


def mask_rates(options: TuneOptions, steps: int) -> tuple[float, float]:
    """Learning rate of SIMoE's masks and rate of their multiplier: what was given, or the default for so many steps."""
    return options.mask_learning_rate or 3 * WAY / steps, options.multiplier_rate or 4 / steps


def _optimizers(
    model: "PreTrainedModel", options: TuneOptions, steps: int, rate: float
) -> tuple[Optimizer | None, LRScheduler | None]:
    """Optimizer and schedule: the Trainer's own, unless there are masks, whose rate is another and stays as it is."""
    if _constraint(model, options, steps) is None:
        return None, None
    groups = parameter_groups(model, mask_rates(options, steps)[0], options.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.999), eps=1e-8)
    scheduler = get_scheduler(options.schedule, optimizer, _warmup_steps(options, steps), steps)
    scheduler.lr_lambdas[1] = lambda step: 1.0
    return optimizer, scheduler


def _warmup_steps(options: TuneOptions, steps: int) -> int:
    """Steps in which the learning rate rises from 0; not the last, since a single step would then learn nothing."""
    return min(math.ceil(options.warmup * steps), steps - 1)


def _arguments(
    output: str, options: TuneOptions, steps: int, rate: float, *, on_cpu: bool, evaluates: bool
) -> TrainingArguments:
    several = processes() > 1
    arguments = TrainingArguments(
        output_dir=output,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        gradient_accumulation_steps=options.accumulation,
        num_train_epochs=options.epochs,
        max_steps=options.steps or -1,
        learning_rate=rate,
        lr_scheduler_type=options.schedule,
        warmup_steps=_warmup_steps(options, steps),
        weight_decay=options.weight_decay,
        bf16=options.bf16,
        seed=options.seed % 2**32,
        data_seed=options.seed % 2**32,
        use_cpu=on_cpu,
        save_strategy="steps",
        save_steps=options.save_every,
        eval_strategy="steps" if evaluates and options.eval_every else "no",
        eval_steps=options.eval_every,
        logging_strategy="steps",
        logging_first_step=True,
        logging_steps=options.log_every,
        report_to=options.report_to.split(","),
        disable_tqdm=True,
        remove_unused_columns=False,
        label_names=["labels"],
        prediction_loss_only=True,
        average_tokens_across_devices=True,
        ddp_backend="gloo" if several and on_cpu else None,
        ddp_find_unused_parameters=True if several else None,  # an expert may be given no token
    )
    if not several:
        arguments._n_gpu = min(arguments.n_gpu, 1)  # or it would split batches over all cards, by threads
    return arguments
