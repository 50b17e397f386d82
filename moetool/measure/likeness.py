"""Comparison of a checkpoint with its source on real text: both predictions, and each layer's output for one input."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import Field
from torch import Tensor

from moetool.architectures.base import Architecture
from moetool.architectures.dense import DenseArchitecture, find_dense_architecture
from moetool.calibration.opening import BOS_HELP, Bos
from moetool.calibration.windows import evaluation_windows, load_tokenizer
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError, UsageError, VerificationError
from moetool.format.families import architecture_of, is_opaque
from moetool.job.job import pick_device
from moetool.job.options import Listed
from moetool.job.progress import Progress, phase
from moetool.job.result import relative_error
from moetool.measure.divergence import Batches
from moetool.measure.loading import computed_in
from moetool.measure.options import LoadedOptions
from moetool.measure.perplexity import EvaluationOptions, perplexity
from moetool.measure.predictions import fitted
from moetool.measure.results import NAT_UNIT, Likeness, shown_kl

if TYPE_CHECKING:
    from moetool.calibration.streaming import StreamedModel


class LikenessOptions(LoadedOptions):
    """Options of the comparison of a checkpoint with its source: the text, and how unlike the two may be."""

    text: Listed | None = Field(
        None,
        description="With --against, also run both on these texts (files, folders, hub data sets or bundled[:KIND], "
        "with commas): KL divergence, top-1 agreement, and the error of each layer's output.",
    )
    windows: int = Field(16, ge=1, description="Windows of each text.")
    sequence_length: int = Field(512, ge=2, description="Tokens per window; by default no more than the context.")
    bos: Bos = Field("auto", description=BOS_HELP)
    max_kl: float | None = Field(
        None, ge=0, description="Fail if KL(source ‖ model) is more on one of the texts, in nats per token."
    )
    min_top1: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Fail if both find the same token likeliest at a smaller share of one text's predictions.",
    )
    max_layer_error: float | None = Field(
        None, ge=0, description="Fail if a layer's relative output error, given the source's input, is larger."
    )

    @property
    def has_limits(self) -> bool:
        """Whether a largest KL divergence, layer error or least agreement was set, beyond which verification fails."""
        return (self.max_kl, self.min_top1, self.max_layer_error) != (None, None, None)


def measure_likeness(made: str | Path, original: str | Path, options: LikenessOptions, progress: Progress) -> Likeness:
    """Run a checkpoint and its source on the text of `options`.

    Raises:
        UsageError: only one is an encoder, or a limit is asked for that cannot be measured.
        InvalidInputError: models or text cannot be used, or compared token by token.
        ResourceError: there is too little memory or disk.
        VerificationError: a limit is not kept, or the output of one of them is not a number.
    """
    text = options.text
    assert text is not None
    result, source = Checkpoint.open(made), Checkpoint.open(original)
    tokenizer = load_tokenizer(result.path)
    options = fitted(options, result, tokenizer)
    same = ("windows", "sequence_length", "bos", "device", "compute_dtype", "keep")
    shared = {name: getattr(options, name) for name in same}
    evaluated = perplexity(str(made), EvaluationOptions(data=text, against=str(original), **shared), progress)
    found = evaluated.against
    assert found is not None
    errors = None
    if (unlike := _incomparable(result, source)) is None:
        windows = evaluation_windows(
            text, tokenizer, sequence_length=options.sequence_length, limit=options.windows, bos=options.bos
        )
        errors = layer_errors(result, source, windows.split(evaluated.batch_rows), options, progress)
    elif options.max_layer_error is not None:
        raise UsageError(f"--max-layer-error: {unlike}.")
    likeness = Likeness(
        text=text,
        windows=evaluated.windows,
        tokens=evaluated.tokens,
        kl=found.kl,
        agreement=found.agreement,
        excess=found.excess,
        layer_error=errors,
        texts=evaluated.texts,
        over_texts=evaluated.over_texts,
    )
    if broken := _broken(likeness, options):
        raise VerificationError(f"{made} is too unlike {original} on {text}: {'; '.join(broken)}.")
    return likeness


def _incomparable(made: Checkpoint, original: Checkpoint) -> str | None:
    """Why layers cannot be compared one by one, if they cannot."""
    if any(is_opaque(one.config) for one in (made, original)):
        return "layers of moetool's own networks are not compared one by one"
    sizes = [(one.settings.get("hidden_size"), one.settings.get("num_hidden_layers")) for one in (made, original)]
    return None if sizes[0] == sizes[1] else "the models have other numbers of layers or other widths"


def _broken(found: Likeness, options: LikenessOptions) -> list[str]:
    """List the limits that are not kept, each with the number that exceeds it."""
    broken = []
    for text in found.texts:
        if (lost := text.against) is None:
            continue
        on = f" on {text.name}" if len(found.texts) > 1 else ""
        # Not the other way round: what is not a number keeps no limit.
        if options.max_kl is not None and not lost.kl <= options.max_kl:
            broken.append(f"KL{on} is {shown_kl(lost.kl)} {NAT_UNIT} (--max-kl {options.max_kl:g}, in nats)")
        if options.min_top1 is not None and not lost.agreement >= options.min_top1:
            broken.append(f"top-1 agreement{on} is {lost.agreement:.4f} (--min-top1 {options.min_top1:g})")
    if (limit := options.max_layer_error) is not None and found.layer_error is not None:
        layers = [f"{layer}: {error:.4g}" for layer, error in found.layer_error.items() if not error <= limit]
        if layers:
            more = f" and {len(layers) - 5} more" if len(layers) > 5 else ""
            broken.append(f"output errors of layers {', '.join(layers[:5])}{more} (--max-layer-error {limit:g})")
    return broken


@torch.inference_mode()
def layer_errors(
    made: Checkpoint, original: Checkpoint, batches: Batches, options: LoadedOptions, progress: Progress
) -> Mapping[int, float]:
    """Relative error of each layer, `‖y' − y‖ / ‖y − x‖` over all tokens: `x` is what the original's layer is given,
    `y` what it makes of that, `y'` what the other model's layer makes of `x`. What both pass on beside the layer (`x`)
    would hide any error.

    One layer of each is in memory, and the hidden states of the text, three times.

    Args:
        made: the checkpoint.
        original: of as many layers of the same width.
        batches: windows of tokens `[batch, length]`.
        options: how models are loaded.
        progress: told of each layer.
    """
    from moetool.calibration.streaming import StreamedModel

    device = pick_device("auto" if options.device == "map" else options.device)
    models = [
        StreamedModel(one, _family(one.config), computed_in(original, options.device, options.compute_dtype), device)
        for one in (original, made)
    ]
    hidden = [models[0].embed(rows) for rows in batches]
    errors: dict[int, float] = {}
    with phase(progress, "Compare layers", models[0].layer_count, "layers"):
        for index in range(models[0].layer_count):
            true, given = (_outputs(model, index, hidden, batches) for model in models)
            lost = sum(_energy(ours - theirs) for ours, theirs in zip(given, true, strict=True))
            total = sum(_energy(after - before) for after, before in zip(true, hidden, strict=True))
            errors[index] = relative_error(lost, total)
            hidden = true
            progress.advance()
    return errors


def _outputs(model: "StreamedModel", index: int, hidden: list[Tensor], batches: Sequence[Tensor]) -> list[Tensor]:
    with model.layer(index) as layer:
        return [model.run_layer(index, layer, rows, tokens) for rows, tokens in zip(hidden, batches, strict=True)]


def _energy(error: Tensor) -> float:
    return error.double().square().sum().item()


def _family(config: Mapping[str, object]) -> Architecture | DenseArchitecture:
    try:
        return architecture_of(config)
    except InvalidInputError:
        return find_dense_architecture(config)
