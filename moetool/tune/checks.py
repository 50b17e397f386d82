"""Options of `moetool tune` that do not go together, or ask for what is not there."""

from collections import Counter
from importlib.util import find_spec

import torch

from moetool.architectures.layers import decoder_layer
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import UsageError, option_of
from moetool.format.kinds import custom_module
from moetool.format.kinds.simoe import SimoeSpec
from moetool.job.processes import sharding
from moetool.runtime.building import empty_model, recomputes
from moetool.runtime.modules.routers import is_choice_bias
from moetool.tune.costs import Learning
from moetool.tune.options import TuneOptions

_OF_MASKS = ("mask_learning_rate", "multiplier_rate", "overlap", "sample_masks")


def check_options(options: TuneOptions) -> None:
    """Raise `UsageError` for options that do not go together, whatever the model."""
    _check_trackers(options.report_to)
    if options.freeze_shared and options.train == "all":
        raise UsageError("--freeze-shared leaves the base alone, --train all does not: give one of them.")
    _check_task_experts(options)
    if options.rank is None and options.lora_alpha is not None:
        raise UsageError("--lora-alpha is for --lora-rank and --train lora: give one of these, too.")
    if options.train == "lora" and (tool := sharding()) is not None:
        raise UsageError(f"--train lora has not been tried with {tool}: leave one of them out.")
    if options.train == "lora" and options.quantize_base != "none":
        raise UsageError("--train lora holds weights as they are, or reads them: leave out --quantize-base.")
    if options.teacher is None and options.teacher_share is not None:
        raise UsageError("--teacher-share is for --teacher: give both or neither.")
    if options.teacher is not None and (tool := sharding()) is not None:
        raise UsageError(f"--teacher has not been tried with {tool}: leave one of them out.")
    if options.compute_dtype not in ("auto", "bfloat16" if options.bf16 else "float32"):
        raise UsageError(
            f"--compute-dtype {options.compute_dtype}: tune holds weights in float32 and computes in it, or with "
            "--bf16 in bfloat16; float16 would need a loss scale that it does not search for."
        )


def check_masks(options: TuneOptions, checkpoint: Checkpoint) -> None:
    """Raise `UsageError` for options of SIMoE's masks where the model has none."""
    fields = type(options).model_fields
    given = [name for name in _OF_MASKS if getattr(options, name) != fields[name].default]
    if given and not isinstance(custom_module(checkpoint.config), SimoeSpec):
        raise UsageError(
            f"{option_of(given[0])} is for what upcycle --method simoe makes; {checkpoint.source} has no masks. "
            "Leave it out."
        )


def check_recomputing(options: TuneOptions, checkpoint: Checkpoint) -> None:
    """Raise `UsageError` where layers cannot be run again on the way back, as the options ask."""
    if options.gradient_checkpointing and not recomputes(checkpoint):
        raise UsageError(
            f"--gradient-checkpointing: transformers cannot run layers of {checkpoint.config['model_type']} again. "
            "Leave it out; a smaller --batch-size needs less memory, too."
        )


def check_balance_bias(options: TuneOptions, checkpoint: Checkpoint) -> None:
    """Raise `UsageError` where `--balance-bias` has nothing to move, or not in this way."""
    if options.balance_bias is None:
        return
    if not any(map(is_choice_bias, checkpoint.tensors)):
        raise UsageError(
            f"--balance-bias: routers of {checkpoint.config['model_type']} have no bias that only the choice of "
            "experts sees, as those of deepseek_v3, glm4_moe and others have. Use --balance."
        )
    if options.train == "task-experts":
        raise UsageError("--train task-experts leaves routers as they are: leave out --balance-bias.")
    if (tool := sharding()) is not None:
        raise UsageError(f"--balance-bias has not been tried with {tool}: leave one of them out.")


def trained_by(options: TuneOptions, checkpoint: Checkpoint) -> Learning:
    """Find what the options train of a model.

    Raises:
        UsageError: the model has nothing of what they ask for.
        InvalidInputError: transformers cannot build the model.
    """
    from moetool.tune.choice import choose_for, decoded_at_once, decoded_numbers, trained_parameters
    from moetool.tune.low_rank import adapted, factor_numbers
    from moetool.tune.task_experts import routed_experts

    model = empty_model(checkpoint.config, checkpoint.path, torch.float32)
    if options.train == "task-experts":
        layers = routed_experts(model)
        return Learning(sum(parameter.numel() for layer in layers for parameter in layer.experts.parameters()))
    frozen, numbers = choose_for(model, options), trained_parameters(model)
    by_layer = decoded_numbers(model)
    again = options.gradient_checkpointing or options.train == "lora"
    decoded = decoded_at_once(model) + (max(by_layer.values(), default=0) if again else by_layer.total())
    if options.rank is None:
        return Learning(numbers, decoded=decoded)
    if options.train != "lora":
        sides = sum(sum(model.get_submodule(name).get_parameter("weight").shape) for name in frozen)
        return Learning(numbers + options.rank * sides, decoded=decoded)
    changed = Counter[str]()
    for name, shape in adapted(model, options.rank).items():
        numbers += factor_numbers(shape, options.rank)
        changed[decoder_layer(name)] += shape.numel()
    return Learning(numbers, max(changed.values(), default=0), decoded)


def _check_task_experts(options: TuneOptions) -> None:
    """Raise `UsageError` for options that would change more than the experts of `--train task-experts`."""
    if options.train != "task-experts":
        if options.task_share is not None:
            raise UsageError("--task-share is for --train task-experts: give both or neither.")
        return
    if options.lora_rank is not None or options.quantize_base != "none":
        raise UsageError("--train task-experts trains nothing else: leave out --lora-rank and --quantize-base.")
    if options.freeze_shared:
        raise UsageError("--freeze-shared is for experts that are deltas to a base, which task-experts are not.")
    if options.weight_decay:
        raise UsageError(
            "--weight-decay would shrink the experts that --train task-experts leaves alone: leave it out."
        )
    if (tool := sharding()) is not None:
        raise UsageError(f"--train task-experts has not been tried with {tool}: leave one of them out.")


def _check_trackers(names: str) -> None:
    """Raise `UsageError` for a tracker that transformers does not know, or that is not installed."""
    if names in ("none", "all"):
        return
    from transformers.integrations.integration_utils import (
        INTEGRATION_TO_CALLBACK,
        get_available_reporting_integrations,
    )

    installed = {*get_available_reporting_integrations(), *(["flyte"] if find_spec("flytekit") else [])}
    for name in names.split(","):
        if name not in INTEGRATION_TO_CALLBACK:
            known = ", ".join(sorted(INTEGRATION_TO_CALLBACK))
            raise UsageError(f"--report-to {names}: there is no {name!r}. Give none, all, or some of {known}.")
        if name not in installed:
            there = ", ".join(sorted(installed)) or "none"
            raise UsageError(f"--report-to {names}: {name} is not installed here; of those that are known, {there} is.")
