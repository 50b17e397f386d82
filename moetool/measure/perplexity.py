"""Perplexity of a model that transformers loads.

Protocol: a text is tokenised as one stream without special tokens and cut into consecutive windows, the rest dropped;
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
from torch import Tensor

from moetool.architectures.dense import is_encoder
from moetool.calibration.opening import BOS_HELP, Bos, opening_text
from moetool.calibration.windows import load_tokenizer
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import VerificationError
from moetool.job.options import Listed
from moetool.job.progress import SILENT, Progress, phase
from moetool.measure.divergence import original_beside
from moetool.measure.loading import load_to_evaluate
from moetool.measure.options import EvaluatedOptions
from moetool.measure.predictions import HiddenTokens, NextTokens, Predictions, exp_loss, fitted, prediction_losses
from moetool.measure.results import Evaluation, OverTexts, SynthesisResult, TextLoss
from moetool.measure.texts import BatchedTexts, calibration_sources, is_own_kind, open_texts
from moetool.runtime.modules.batch_dependence import depends_on_batch


class EvaluationOptions(EvaluatedOptions):
    """Options of an evaluation: texts, windows, dtype, and the model to compare with."""

    data: Listed = Field(
        description="Texts: files, folders, hub data sets or bundled[:KIND], as for --calibration; several get "
        "a row each. [required without --tasks]"
    )
    sequence_length: int = Field(2048, ge=2, description="Tokens per window; by default no more than the context.")
    windows: int | None = Field(None, ge=1, description="Use only the first N windows of each text.")
    bos: Bos = Field("auto", description=BOS_HELP)
    against: str | None = Field(
        None,
        description="The original: also measure KL divergence from it, how often both find the same token likeliest, "
        "and the difference of the losses with its standard error.",
    )
    batch_tokens: int = Field(2048, ge=1, description="Tokens per batch.")


def perplexity(path: str, options: EvaluationOptions, progress: Progress = SILENT) -> Evaluation:
    """Evaluate a checkpoint; any that transformers loads, moetool's among them.

    Raises:
        InvalidInputError: model, tokenizer or text cannot be used.
        ResourceError: there is too little memory for the model.
        VerificationError: the model's output is not a number.
    """
    checkpoint = Checkpoint.open(path)
    tokenizer = load_tokenizer(checkpoint.path)
    encoder = is_encoder(checkpoint.config)
    sources = calibration_sources(checkpoint, options.against)  # a manifest that cannot be read costs no evaluation
    options = fitted(options, checkpoint, tokenizer)
    texts = open_texts(
        options.data,
        checkpoint,
        tokenizer,
        sequence_length=options.sequence_length,
        limit=options.windows,
        bos=options.bos,
        progress=progress,
    )
    batch = max(1, options.batch_tokens // options.sequence_length)
    asked: Predictions = HiddenTokens(tokenizer, batch) if encoder else NextTokens()
    batched = BatchedTexts(texts, 1 if encoder else batch)
    batches = batched.batches
    beside = (
        original_beside(options.against, checkpoint, tokenizer, batches, asked, options, progress)
        if options.against
        else nullcontext()
    )
    with beside as comparison:
        model, synthesis = load_to_evaluate(checkpoint, options, progress)
        losses = list[Tensor]()
        with phase(progress, "Evaluate", len(batches), "batches of windows"):
            for number, rows in enumerate(batches):
                logits = asked.logits(model, rows)
                losses.append(prediction_losses(logits, asked.targets(rows)))
                if comparison is not None:
                    comparison.add(number, rows, logits, losses[-1])
                progress.advance()
    told = [
        TextLoss(
            name=text.name,
            perplexity=exp_loss(nll := torch.cat(losses[own]).mean().item()),
            nll=nll,
            windows=len(text.windows),
            tokens=text.windows.numel(),
            own_kind=is_own_kind(text.name, sources),
            against=None if comparison is None else comparison.divergence(own),
        )
        for text, own in batched.of_each
    ]
    for text in told:
        if not math.isfinite(text.nll):
            raise VerificationError(f"{path} gives a loss of {text.nll} on {text.name}: its weights are damaged.")
    nll = torch.cat(losses).mean().item()
    return Evaluation(
        model=path,
        data=options.data,
        perplexity=exp_loss(nll),
        nll=nll,
        windows=sum(text.windows for text in told),
        tokens=sum(text.tokens for text in told),
        sequence_length=options.sequence_length,
        begin=opening_text(tokenizer, options.bos),
        protocol="pseudo-perplexity" if encoder else "perplexity",
        synthesized=synthesis.chosen,
        synthesis=SynthesisResult.of(synthesis),
        batch_rows=batch,
        depends_on_batch=depends_on_batch(model),
        against=None if comparison is None else comparison.divergence(),
        unrelated=None if comparison is None else comparison.unrelated,
        texts=told,
        over_texts=OverTexts.of(told),
        calibration=sources,
    )
