"""Modules of codes in a model: put in where its config lists them, found, filled, and made dense."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch import nn

from moetool.architectures.base import Settings
from moetool.errors import InvalidInputError
from moetool.format.beside import quantized_beside
from moetool.representations.quantized import QuantizedMatrix, QuantizedWeight, check_rows
from moetool.runtime.modules.insertion import paths_in
from moetool.runtime.modules.quantized import QuantizedEmbedding, QuantizedLinear, QuantizedModule

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def insert_quantized(model: "PreTrainedModel", config: Settings) -> None:
    """Put modules of codes, still empty, where `config` lists them, and where the head is tied to one of these.

    Raises:
        InvalidInputError: the model has no such linear layer or embedding.
    """
    beside = quantized_beside(config)
    listed = {path: (name, beside[name]) for name, path in paths_in(model, beside).items()}
    for path, (name, form) in listed.items():
        if path == "lm_head" and not hasattr(model, path):
            continue  # the bare decoder, AutoModel
        try:
            native = model.get_submodule(path)
        except AttributeError as error:
            raise InvalidInputError(f"quantization_config: the model of config.json has no module {name}.") from error
        model.set_submodule(path, module := _quantized(name, native, form))
        for tied in _tied_to(model, path):
            if tied in listed:
                continue  # it is stored, too
            other = model.get_submodule(tied)
            if isinstance(other, nn.Linear | nn.Embedding):
                model.set_submodule(tied, _around(module.stored, other, module))


def _around(
    stored: QuantizedWeight, native: nn.Linear | nn.Embedding, owner: QuantizedModule | None = None
) -> QuantizedModule:
    if isinstance(native, nn.Embedding):
        return QuantizedEmbedding(stored, native, owner)
    return QuantizedLinear(stored, native.bias, owner)


def _quantized(name: str, native: nn.Module, form: QuantizedMatrix) -> QuantizedModule:
    if not isinstance(native, nn.Linear | nn.Embedding):
        raise InvalidInputError(f"quantization_config: {name} is a {type(native).__name__}, which no codes stand for.")
    rows, columns = native.weight.shape
    try:
        check_rows(form, rows)
        stored = form.build((rows, columns), native.weight.dtype, native.weight.device)
    except ValueError as error:
        raise InvalidInputError(f"quantization_config: {name} cannot be stored as '{form.spec}': {error}.") from error
    return _around(stored, native)


def _tied_to(model: "PreTrainedModel", path: str) -> Iterator[str]:
    """Modules whose weight is that of another; which of the two a file has does not matter."""
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    pairs = [[name.removesuffix(".weight") for name in pair] for pair in tied.items()]
    return (other for pair in pairs if path in pair for other in pair if other != path)


def fill_embeddings(model: "PreTrainedModel") -> None:
    """Set what embeddings of codes hold and no file has, as the language model that they belong to initializes it."""
    from transformers import PreTrainedModel

    parts = [(name, part) for name, part in model.named_modules() if isinstance(part, PreTrainedModel)]
    for path, module in quantized_modules(model):
        if isinstance(module, QuantizedEmbedding):
            [*_, own] = (part for name, part in parts if not name or path.startswith(f"{name}."))
            module.fill(own._init_weights)


def dense_modules(model: "PreTrainedModel") -> None:
    """Put ordinary modules in the place of those of codes; what was tied is tied."""
    made: dict[QuantizedWeight, nn.Parameter] = {}
    for name, module in [*quantized_modules(model)]:
        if module.stored not in made:
            made[module.stored] = module.matrix()
        model.set_submodule(name, module.dense(made[module.stored]))


def is_quantized(module: nn.Module) -> bool:
    """Whether a module outside the experts stores its matrix as codes."""
    return isinstance(module, QuantizedModule)


def quantized_modules(model: nn.Module) -> Iterator[tuple[str, QuantizedModule]]:
    """The modules of a model that hold their matrices as codes, by name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, QuantizedModule))


def still_quantized(model: "PreTrainedModel") -> set[str]:
    """Names of the modules whose codes a model holds, without those of adapters around them.

    Raises:
        InvalidInputError: a head and an embedding that the config ties are not tied, or the head's codes are gone.
    """
    found = {
        name.removesuffix(".base_layer").removesuffix(".original_module"): module
        for name, module in quantized_modules(model)
    }
    heads = {head for module in found.values() for head in module.tied}
    free = {name for name, module in found.items() if module.is_tied}
    for target, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        pair = {name.removesuffix(".weight") for name in (target, source)}
        free -= pair
        if len(coded := pair & found.keys()) == 1:
            raise InvalidInputError(
                f"{min(pair - coded)} was replaced, and the config ties it to {min(coded)}, which is stored as codes. "
                "Call model.tie_weights() for one matrix, or set model.config.tie_word_embeddings = False for two."
            )
    if lost := [name for name, module in found.items() if module.is_tied and module not in heads]:
        does = f"model.{lost[0]} = copy.deepcopy(model.{lost[0]}) gives it the matrix that it had"
        if lost[0] not in free:
            does = "Call model.tie_weights() to tie it to that"
        raise InvalidInputError(f"{lost[0]} has no codes of its own, and what it is tied to was replaced. {does}.")
    if free:
        raise InvalidInputError(
            f"{min(free)} has no codes of its own, and the config no longer ties it to the embedding, whose codes it "
            "uses. Set model.config.tie_word_embeddings = True."
        )
    return {name for name, module in found.items() if not module.is_tied}
