"""Perplexity of a model that transformers loads.

Protocol: the text is tokenised as one stream without special tokens and cut into consecutive windows, the rest dropped;
perplexity is exp of the mean next-token loss over the length − 1 predictions of every window. Where the tokenizer
begins every text with a BOS token, so does every window: that token is one of its own, and the next is predicted from
it, so that there are as many predictions (`--bos never` leaves it out, as most published numbers of Llama do). Of an
encoder it is the pseudo-perplexity, for which every token of a window is hidden once (Salazar et al., "Masked Language
Model Scoring", arXiv:1910.14659).
"""

import math
from contextlib import nullcontext

import torch
from pydantic import Field

from moetool.architectures.base import whole_number
from moetool.architectures.dense import is_encoder
from moetool.calibration.opening import BOS_HELP, Bos, opening_text
from moetool.calibration.windows import check_vocabulary, evaluation_windows, load_tokenizer
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import VerificationError
from moetool.job.options import fit_context
from moetool.job.progress import SILENT, Progress, phase
from moetool.measure.divergence import original_beside
from moetool.measure.options import EvaluatedOptions
from moetool.measure.predictions import HiddenTokens, NextTokens, Predictions, marks, prediction_losses
from moetool.measure.told import Evaluation, SynthesisTold
from moetool.runtime.modules.batch_dependence import depends_on_batch


class EvaluationOptions(EvaluatedOptions):
    """What to evaluate on, and how."""

    data: str = Field(
        description="Text: a file, folder or hub data set, as for --calibration. [required without --tasks]"
    )
    sequence_length: int = Field(2048, ge=2, description="Tokens per window; by default no more than the context.")
    windows: int | None = Field(None, ge=1, description="Only the first so many windows.")
    bos: Bos = Field("auto", description=BOS_HELP)
    against: str | None = Field(
        None,
        description="The original: also tell the KL divergence from it, how often both find the same token likeliest, "
        "and the delta of the losses with its standard error.",
    )
    batch_tokens: int = Field(2048, ge=1, description="Tokens per batch.")


def perplexity(path: str, options: EvaluationOptions, progress: Progress = SILENT) -> Evaluation:
    """Evaluate a checkpoint; any that transformers loads, moetool's among them.

    Raises:
        InvalidInputError: model, tokenizer or text cannot be used.
        ResourceError: there is too little memory for the model.
        VerificationError: the model's output is not a number.
    """
    from moetool.measure.loading import load_to_evaluate

    checkpoint = Checkpoint.open(path)
    tokenizer = load_tokenizer(checkpoint.path)
    encoder = is_encoder(checkpoint.config)
    options = fit_context(options, checkpoint.settings, sum(map(len, marks(tokenizer))) if encoder else 0)
    bos: Bos = "never" if encoder else options.bos
    windows = evaluation_windows(
        options.data, tokenizer, sequence_length=options.sequence_length, limit=options.windows, bos=bos
    )
    check_vocabulary(windows, whole_number(checkpoint.settings, "vocab_size"))
    batch = max(1, options.batch_tokens // options.sequence_length)
    asked: Predictions = HiddenTokens(tokenizer, batch) if encoder else NextTokens()
    batches = windows.split(1 if encoder else batch)
    beside = (
        original_beside(options.against, checkpoint, tokenizer, batches, asked, options, progress)
        if options.against
        else nullcontext()
    )
    with beside as comparison:
        model, synthesis = load_to_evaluate(checkpoint, options, progress)
        losses = []
        with phase(progress, "Evaluate", len(batches)):
            for number, rows in enumerate(batches):
                logits = asked.logits(model, rows)
                losses.append(prediction_losses(logits, asked.targets(rows)))
                if comparison is not None:
                    comparison.add(number, rows, logits, losses[-1])
                progress.advance()
        nll = torch.cat(losses).mean().item()
    if not math.isfinite(nll):
        raise VerificationError(f"{path} gives a loss of {nll} on {options.data}: its weights are damaged.")
    return Evaluation(
        model=path,
        data=options.data,
        perplexity=math.exp(nll) if nll < 700 else math.inf,
        nll=nll,
        windows=len(windows),
        tokens=windows.numel(),
        sequence_length=options.sequence_length,
        begin=opening_text(tokenizer, bos),
        protocol="pseudo-perplexity" if encoder else "perplexity",
        synthesized=synthesis.chosen,
        synthesis=SynthesisTold.of(synthesis),
        batch_rows=batch,
        depends_on_batch=depends_on_batch(model),
        against=None if comparison is None else comparison.told(),
    )
