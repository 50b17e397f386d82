"""Low-rank updates of all matrices (LoRA, arXiv:2106.09685) of a model that is in memory, or read layer by layer."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moetool.architectures.dense.networks import is_linear
from moetool.architectures.described import language_model_in
from moetool.architectures.layers import decoder_layer
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError, UsageError
from moetool.format.kinds.moefied import is_selector
from moetool.numerics.seeding import generator, linear_std, uniform
from moetool.runtime.building import recomputes
from moetool.runtime.modules.experts import SharedBaseExperts
from moetool.runtime.modules.insertion import CustomLayer, is_placeholder
from moetool.runtime.modules.quantized_in_model import is_quantized
from moetool.tune.options import LORA_ALPHA, TuneOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from moetool.architectures import Architecture
    from moetool.architectures.dense import DenseArchitecture
    from moetool.training.changed import ChangedModel
    from moetool.training.weights import ModelWeights

TOLD_OF_READING = "read layer by layer in every step, since all together take more memory"
_FACTORS = "low_rank"  # the model's module that holds them


def adapted(model: "PreTrainedModel", rank: int) -> dict[str, torch.Size]:
    """Names and shapes of the matrices `[…, rows, columns]` in a language model's layers to which low-rank updates are
    added: linear layers and experts of which nothing is trained, whose sides are longer than `rank`.

    Raises:
        UsageError: there are none.
    """
    found = dict[str, torch.Size]()
    path, language = language_model_in(model)
    for name, module in language.named_modules(prefix=path):
        own = isinstance(module, SharedBaseExperts) or (isinstance(module, CustomLayer) and module.is_efficient)
        if not decoder_layer(f"{name}.") or own or is_quantized(module) or is_selector(name):
            continue
        for inside, parameter in module.named_parameters(recurse=False):
            is_matrix = is_linear(module) and inside == "weight"
            is_several = "experts" in name and parameter.dim() == 3
            is_free = parameter.is_floating_point() and not (parameter.requires_grad or is_placeholder(parameter))
            if (is_matrix or is_several) and is_free and min(parameter.shape[-2:]) > rank:
                found[f"{name}.{inside}"] = parameter.shape
    if not found:
        raise UsageError(
            f"--lora-rank {rank}: no frozen matrix has more rows and columns than that. Give a lower rank."
        )
    return found


def factor_numbers(shape: torch.Size, rank: int) -> int:
    """How many numbers a low-rank update of matrices `[…, rows, columns]` has."""
    return rank * sum(shape[-2:]) * shape[:-2].numel()


def open_changed(
    checkpoint: Checkpoint, options: TuneOptions, dtype: torch.dtype, device: torch.device, *, streams: bool
) -> "ChangedModel":
    """Open a model to train low-rank updates and routers of it, and experts in moetool's own forms.

    Args:
        checkpoint: what it is read from.
        options: of the command.
        dtype: of weights that are not trained.
        device: on which layers run, if it `streams`.
        streams: whether the weights of a layer are read whenever it runs.

    Raises:
        UsageError: the model has nothing of the kind.
        InvalidInputError: transformers cannot load it.
    """
    from moetool.training.changed import ChangedModel
    from moetool.training.masters import LowRankUpdate
    from moetool.tune.bias_balance import choice_biases
    from moetool.tune.choice import choose_for

    assert options.rank is not None
    weights = _opened(checkpoint, dtype, device) if streams else _loaded(checkpoint, dtype)
    model = weights.model
    choose_for(model, options)
    shapes = adapted(model, options.rank)
    kept = weights.keep({name: own for name, own in model.named_parameters() if own.requires_grad})
    for name, own in kept.items():
        own.data = _exact(name, own.data, weights, checkpoint).to(own.device, torch.float32)
    changes = {}
    for name, (*several, rows, columns) in shapes.items():
        stream = generator(options.seed, "lora", name)
        right = uniform((*several, options.rank, columns), linear_std(columns), stream).to(model.device)
        changes[name] = LowRankUpdate(right, rows, (options.lora_alpha or LORA_ALPHA) / options.rank)
    model.add_module(_FACTORS, nn.ParameterList(change.numbers for change in changes.values()))
    moved = () if options.balance_bias is None else choice_biases(model)
    return ChangedModel(weights, changes, {*kept, *changes, *moved})


def _exact(name: str, held: Tensor, weights: "ModelWeights", checkpoint: Checkpoint) -> Tensor:
    """A tensor as the files have it, where it lies there by itself: routers are often stored finer than the rest."""
    stored = [*weights.on_disk({name: held})]
    is_alone = len(stored) == 1 and stored[0] in checkpoint.tensors
    exact = checkpoint.read(stored[0]) if is_alone else held
    return exact if exact.shape == held.shape else held


def _loaded(checkpoint: Checkpoint, dtype: torch.dtype) -> "ModelWeights":
    from moetool.checkpoint.settings import described_in
    from moetool.runtime.loading import load_model
    from moetool.training.weights import HeldWeights

    with described_in(checkpoint.path):
        model = load_model(checkpoint, dtype)
    return HeldWeights(model, dict.fromkeys(_paths(model)))


def _paths(model: "PreTrainedModel") -> Iterator[str]:
    """Paths of the layers that have parameters, each as often as it has some."""
    return filter(None, (decoder_layer(name) for name, _ in model.named_parameters()))


def _opened(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> "ModelWeights":
    from moetool.training.weights import open_streamed

    architecture = streamed_as(checkpoint)
    assert architecture is not None
    paths = [architecture.layer_path(layer) for layer in range(architecture.layers)]
    weights = open_streamed(checkpoint, architecture, paths, device, dtype)
    vars(weights.model)["to"] = lambda *_, **__: weights.model  # what is not in memory cannot be moved
    return weights


def streamed_as(checkpoint: Checkpoint) -> "Architecture | DenseArchitecture | None":
    """What is known of a model whose layers can be read whenever they run; `None` of any other."""
    from moetool.architectures import find_architecture
    from moetool.architectures.dense import find_dense_architecture
    from moetool.format.marker import moetool_entry

    if moetool_entry(checkpoint.config) is not None or not recomputes(checkpoint):
        return None
    for find in (find_architecture, find_dense_architecture):
        try:
            return find(checkpoint.config)
        except InvalidInputError:
            continue
    return None
