"""Routing of texts: shares of choices per expert and layer (PESC, Fig. 4; SIMoE, Fig. 2; G-MoEfication, Fig. 5)."""

from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from moetool.calibration.opening import BOS_HELP, Bos, opening_text
from moetool.calibration.windows import load_tokenizer
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError, VerificationError
from moetool.job.options import Listed, Options, fit_context
from moetool.job.progress import SILENT, Progress, phase
from moetool.measure.loading import load_for
from moetool.measure.results import Clustering, RoutingResult, TextRouting
from moetool.measure.texts import open_texts
from moetool.runtime.modules.batch_dependence import depends_on_batch
from moetool.runtime.modules.insertion import experts_per_token
from moetool.runtime.modules.neuron_experts import NeuronExperts
from moetool.runtime.modules.routers import Routers
from moetool.runtime.modules.simoe_mixing import Interpolation, interpolation_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class RoutingOptions(Options):
    """Options of `moetool routing`: texts to compare, windows, device and dtype."""

    data: Listed = Field(
        description="Texts to tell apart: files, folders, hub data sets or bundled[:KIND], with commas."
    )
    sequence_length: int = Field(2048, ge=2, description="Tokens per window; by default no more than the context.")
    windows: int | None = Field(64, ge=1, description="Use only the first N windows of each text.")
    bos: Bos = Field("auto", description=BOS_HELP)
    device: str = Field("auto", description="cpu, cuda, … or `map` to spread a large model over what there is.")
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="For running the model (auto: float32 on CPU, else as stored)."
    )


class _Counter:
    """Counts how often each expert is chosen, in routers and selectors of any kind."""

    def __init__(self, model: "PreTrainedModel") -> None:
        self._model = model
        self._routers = Routers(model)
        self._interpolation = interpolation_of(model)
        self._neurons = [module for module in model.modules() if isinstance(module, NeuronExperts)]
        self._seen: list[Tensor] = []
        for module in self._neurons:
            module.on_selection = self._see
        if not (len(self._routers) or self._interpolation is not None or self._neurons):
            raise InvalidInputError("This model has no experts to choose from.")

    def _see(self, chosen: Tensor) -> None:
        self._seen.append(chosen)

    @torch.inference_mode()
    def counts(self, window: Tensor, top_k: int) -> Tensor:
        """Choices on one window `[1, length]`, `[layers, experts]` fp64."""
        self._seen = []
        if self._interpolation is not None:
            self._interpolation.prompt_ends = _last_token(window)
        positions = torch.arange(window.shape[1], device=window.device)[None]
        with self._routers.watched():
            self._model(input_ids=window, position_ids=positions, use_cache=False)
        if self._interpolation is not None:
            return _alpha(self._interpolation)
        if self._neurons:
            sizes = [module.num_experts for module in self._neurons]
            return torch.stack([_tally(chosen, size) for chosen, size in zip(self._seen, sizes, strict=True)])
        found = []
        for logits, chosen in zip(self._routers.logits, self._routers.chosen, strict=True):
            taken = logits.topk(top_k, dim=-1).indices if chosen is None else chosen
            found.append(_tally(taken, logits.shape[-1]))
        return torch.stack(found)


def _last_token(window: Tensor) -> Tensor:
    ends = torch.zeros_like(window, dtype=torch.bool)
    ends[:, -1] = True
    return ends


def _alpha(interpolation: Interpolation) -> Tensor:
    assert interpolation.alpha is not None
    return interpolation.alpha.double().cpu()


def _tally(chosen: Tensor, experts: int) -> Tensor:
    return torch.bincount(chosen.flatten(), minlength=experts).double().cpu()


def routing(path: str, options: RoutingOptions, progress: Progress = SILENT) -> RoutingResult:
    """Shares of all choices that each expert gets on each text, layer by layer.

    Raises:
        InvalidInputError: model or text cannot be used, or the model has no experts.
        VerificationError: the model's routing is not a number.
    """
    checkpoint = Checkpoint.open(path)
    options = fit_context(options, checkpoint.settings)
    tokenizer = load_tokenizer(checkpoint.path)
    model = load_for(checkpoint, options.device, options.compute_dtype, progress)
    counter, top_k = _Counter(model), experts_per_token(model)
    opened = open_texts(
        options.data,
        checkpoint,
        tokenizer,
        sequence_length=options.sequence_length,
        limit=options.windows,
        bos=options.bos,
        progress=progress,
    )
    texts = [text.name for text in opened]
    found = []
    for text, windows in opened:
        counts = []
        with phase(progress, text, len(windows), "windows"):
            for window in windows:
                counts.append(counter.counts(window[None].to(model.device), top_k))
                progress.advance()
        if not (every := torch.stack(counts)).isfinite().all():
            raise VerificationError(f"{path} gives NaN or infinity on {text}: its weights are damaged.")
        found.append(every)
    shares = [_shares(counts.sum(0)) for counts in found]
    components = _components(torch.cat([_shares(counts).flatten(1) for counts in found]))
    return RoutingResult(
        model=path,
        begin=opening_text(tokenizer, options.bos),
        data=[
            TextRouting(
                name=text, tokens=len(counts) * options.sequence_length, shares=_rounded(mean), components=_rounded(own)
            )
            for text, counts, mean, own in zip(
                texts, found, shares, components.split([len(counts) for counts in found]), strict=True
            )
        ],
        depends_on_batch=depends_on_batch(model),
        clustering=_clustering(torch.stack(shares)) if len(texts) > 1 else None,
    )


def _rounded(matrix: Tensor) -> list[list[float]]:
    return [[round(value, 6) for value in row] for row in matrix.tolist()]


def _shares(counts: Tensor) -> Tensor:
    """Normalise counts `[..., experts]` to shares that sum to 1."""
    return counts / counts.sum(-1, keepdim=True)


def _components(rows: Tensor) -> Tensor:
    """The two principal components `[windows, 2]` of rows of shares."""
    centred = rows - rows.mean(0)
    left, values, _ = torch.linalg.svd(centred, full_matrices=False)
    projected = left[:, :2] * values[:2]
    return F.pad(projected, (0, 2 - projected.shape[1]))


def _clustering(shares: Tensor) -> Clustering:
    """Distances between texts and their clustering, from `[texts, layers, experts]`."""
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import squareform

    distances = (shares[:, None] - shares[None]).abs().sum(-1).mean(-1) / 2
    joined = linkage(squareform(distances.numpy(), checks=False), method="average")
    return Clustering(_rounded(distances), joined.tolist())
