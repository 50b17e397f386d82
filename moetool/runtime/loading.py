"""Loading a model through transformers, quietly, and refusing one that is not all that its files are."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from moetool.architectures import aliases
from moetool.architectures.base import Settings
from moetool.architectures.dense import find_dense_architecture, head_of_a_task, is_encoder
from moetool.architectures.described import language_model_class
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.promises import what_to_do
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.settings import model_config
from moetool.checkpoint.sizes import format_bytes
from moetool.errors import InvalidInputError, ResourceError, in_one_line
from moetool.format.entry import is_quantized_elsewhere
from moetool.format.families import architecture_of
from moetool.format.marker import moetool_entry
from moetool.quiet import quiet
from moetool.runtime.memory import free_bytes, sparing_memory, spread_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Buffers that files of older versions of transformers hold, and that it has computed itself ever since.
_COMPUTED = re.compile(r"\.(inv_freq|masked_bias|position_ids)$")
_LAYER = re.compile(r"\.(?:layers?|h)\.(\d+)\.")
_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
_NAMED = 3  # tensors that an error names


def _mend_llama4() -> None:
    """Let Llama 4 with pictures run in transformers 5.24.0, which asks outputs of its language model for those of its
    eye, that they do not have."""
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast

    if not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):
        MoeCausalLMOutputWithPast.image_outputs = None


def model_class(config: Mapping[str, object]) -> Any:
    """`AutoModelForMaskedLM` for a family of encoders, for any other the class of its causal language model."""
    from transformers import AutoModelForMaskedLM

    if config.get("model_type") == "llama4":
        _mend_llama4()
    return AutoModelForMaskedLM if is_encoder(config) else language_model_class(config.get("model_type"))


@dataclass(frozen=True)
class LoadingMemory:
    """Bytes of memory that a model takes.

    Attributes:
        needed: to load all of it, at the peak.
        free: where it goes.
        layer: of the largest layer.
        outside: of what is in no layer.
    """

    needed: int
    free: int
    layer: int
    outside: int


def loading_memory(
    checkpoint: Checkpoint, dtype: torch.dtype | Literal["auto"], device: torch.device | str | None = None
) -> LoadingMemory:
    """Memory that `load_model` takes with these arguments, from the headers.

    It holds all tensors, and beside them the pieces of one layer's tensors while they are put together. A device map
    has the memory of all cards and of the machine.
    """
    # Another tool knows what its tensors become; most likely they stay as they are.
    foreign = is_quantized_elsewhere(checkpoint.config)
    total, layers = 0, Counter[str]()
    for name, info in checkpoint.tensors.items():
        becomes = info.dtype if dtype == "auto" or foreign or not info.dtype.is_floating_point else dtype
        size = info.nbytes // info.dtype.itemsize * becomes.itemsize
        total += size
        if found := _LAYER.search(name):
            layers[found[1]] += size
    free = spread_bytes() if device in _MAPS else free_bytes(device)
    largest = max(layers.values(), default=0)
    return LoadingMemory(total + largest, free, largest, total - sum(layers.values()))


def check_memory(
    checkpoint: Checkpoint, dtype: torch.dtype | Literal["auto"], device: torch.device | str | None
) -> LoadingMemory:
    """The memory that loading a model takes; a dense model that is spread by a device map goes to disk, too.

    Raises:
        ResourceError: it does not.
    """
    memory = loading_memory(checkpoint, dtype, device)
    if memory.needed > memory.free and not (device in _MAPS and _can_go_to_disk(checkpoint)):
        form = "it is stored" if dtype == "auto" else str(dtype).removeprefix("torch.")
        where = "on all devices together" if device in _MAPS else f"on {device or 'cpu'}"
        ways = ["compress it further"]
        if device not in _MAPS and torch.cuda.is_available():
            ways.insert(0, "spread it over all devices (--device map)")
        if dtype == torch.float32:
            ways.insert(0, "compute in 16 bits (--compute-dtype bfloat16)")
        raise ResourceError(
            f"Loading {checkpoint.source} as {form} needs about {format_bytes(memory.needed)} of memory, its files are "
            f"{format_bytes(checkpoint.weight_bytes)}; {format_bytes(memory.free)} are free {where}. Free some, "
            f"{', or '.join(ways)}."
        )
    return memory


def _can_go_to_disk(checkpoint: Checkpoint) -> bool:
    """Whether transformers can leave tensors on disk; those that it puts together, experts, and those that are decoded
    it cannot."""
    if checkpoint.stored_as is not None:
        return False
    try:
        architecture_of(checkpoint.config)
    except InvalidInputError:
        return True
    return False


def load_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype | Literal["auto"],
    device: torch.device | str | None = None,
    *,
    paged: bool = False,
) -> "PreTrainedModel":
    """A language model in evaluation mode, every tensor of which is the file's; `device` may be a device map such as
    `"auto"`. Of a model that is to be `paged` what fits is not asked here: its files are mapped.

    Raises:
        InvalidInputError: transformers cannot load it, or it has other tensors than the files, in names or shapes.
        ResourceError: there is too little memory for it.
    """
    from moetool.runtime.attention import attend_by_kernels

    if not paged:
        check_memory(checkpoint, dtype, device)
    renamed = {re.escape(alias): own for alias, own in aliases(checkpoint.config).items()}
    options = {
        "dtype": dtype,
        "device_map": device,
        "key_mapping": renamed or None,
        "ignore_mismatched_sizes": True,  # refused below, by name
        "output_loading_info": True,
    }
    try:
        with quiet(), sparing_memory():
            if checkpoint.stored_as is None or moetool_entry(checkpoint.config) is not None:
                loader = model_class(checkpoint.config).from_pretrained
                model, told = loader(checkpoint.path, trust_remote_code=False, **options)
            else:
                model, told = _from_decoded(checkpoint, options)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        _refuse_experts(checkpoint)
        raise InvalidInputError(f"transformers cannot load {checkpoint.source}: {in_one_line(error, 300)}") from error
    refuse_loaded(checkpoint, model, told)
    _forget_aliases(model, renamed)
    run_experts_of_any_width(model)
    attend_by_kernels(model)
    return model.eval()


class _OnDisk:
    """A tensor of a checkpoint, which transformers' loader reads, as a slice of a file, when it comes to it."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint, self._name = checkpoint, name

    def __getitem__(self, _: object) -> Tensor:
        return self._checkpoint.read(self._name)


def _from_decoded(checkpoint: Checkpoint, options: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """What `from_pretrained` gives for a checkpoint that another tool has quantized, each tensor decoded by moetool:
    transformers' own way needs the tool, a card, or sizes that blocks divide."""
    from transformers import GenerationConfig
    from transformers.utils import GENERATION_CONFIG_NAME

    described, tensors = model_config(checkpoint.config, checkpoint.path), checkpoint.tensors
    described._name_or_path = str(checkpoint.path)
    found = model_class(checkpoint.config)._model_mapping[type(described)]
    kind = found[0] if isinstance(found, tuple) else found
    model, told = kind.from_pretrained(
        None, config=described, state_dict={name: _OnDisk(checkpoint, name) for name in tensors}, **options
    )
    if (checkpoint.path / GENERATION_CONFIG_NAME).exists():
        model.generation_config = GenerationConfig.from_pretrained(checkpoint.path)
    return model, told


def surplus(names: Sequence[str], config: Settings) -> list[str]:
    """The names that a model has no tensor for and should have: not of the heads that its family's files have
    for other tasks, of layers that predict further tokens, or of buffers that transformers computes itself."""
    unused = find_dense_architecture(config).unused if is_encoder(config) else ()
    layers, further = (config.get(key) for key in ("num_hidden_layers", "num_nextn_predict_layers"))
    beyond = range(layers, layers + further) if isinstance(layers, int) and isinstance(further, int) else range(0)

    def is_known(name: str) -> bool:
        layer = _LAYER.search(name)
        return (
            name.startswith(unused) or bool(_COMPUTED.search(name)) or (layer is not None and int(layer[1]) in beyond)
        )

    return sorted(name for name in names if not is_known(name))


def beside_modules(names: Iterable[str], model: "PreTrainedModel") -> set[str]:
    """Those names of tensors that belong to no module of a model, such as a head for another task: of their path it has
    nothing but the whole model. They are carried along, unused."""
    base, modules = model.base_model_prefix, {path for path, _ in model.named_modules()}

    def is_beside(name: str) -> bool:
        known = name.rpartition(".")[0]
        while known not in modules:
            known = known.rpartition(".")[0]
        return known in ("", base)

    return {name for name in names if is_beside(name) and is_beside(f"{base}.{name}")}


def run_experts_of_any_width(model: "PreTrainedModel") -> None:
    """Let a model's experts run in moetool's way, which takes any shape, if torch's grouped products cannot."""
    from moetool.runtime.modules.dense_experts import MOETOOL_EXPERTS, fits_grouped_products

    native = (own for own in model.modules() if hasattr(own, "is_transposed") and hasattr(own, "_apply_gate"))
    if not all(map(fits_grouped_products, native)):
        model.set_experts_implementation(MOETOOL_EXPERTS)


def refuse_loaded(checkpoint: Checkpoint, model: "PreTrainedModel", told: Mapping[str, Any]) -> None:
    """Raise an error for missing, surplus or misshapen tensors, of which transformers only warns when it loads a
    model."""
    unexpected, state = set(told["unexpected_keys"]), model.state_dict()
    missing = sorted(name for name in told["missing_keys"] if name not in state or state[name].numel())
    wrong = {
        "missing from the files": missing,
        "in the files, but not in the model that config.json describes": surplus(
            list(unexpected - beside_modules(unexpected, model)), checkpoint.settings
        ),
        "of another shape than config.json promises": [
            f"{name} {list(found)} instead of {list(promised)}"
            for name, found, promised in sorted(told["mismatched_keys"])
        ],
    }
    problems = [
        f"{len(names)} {'tensor is' if len(names) == 1 else 'tensors are'} {what} ({', '.join(names[:_NAMED])}"
        f"{', …' if len(names) > _NAMED else ''})"
        for what, names in wrong.items()
        if names
    ]
    if problems:
        refuse_other_head(checkpoint)
        _refuse_experts(checkpoint)
        raise InvalidInputError(
            f"{checkpoint.source} is not a whole {checkpoint.config.get('model_type')} model: {'; '.join(problems)}. "
            f"Results would be wrong; refusing. {what_to_do(missing, checkpoint.tensors)}"
        )


def refuse_other_head(checkpoint: Checkpoint) -> None:
    """Raise `InvalidInputError` for an encoder whose files have the head of a task, not that of hidden words."""
    if (head := head_of_a_task(checkpoint.config)) is not None:
        raise InvalidInputError(
            f"{checkpoint.source} is a {head}: it has the head of a task where one is needed that finds hidden words. "
            "Give the masked language model that it was trained from; what moefy makes of that can be given any head."
        )


def _refuse_experts(checkpoint: Checkpoint) -> None:
    """Raise if the headers already tell which experts are not as config.json promises, with their names on disk."""
    try:
        architecture = architecture_of(checkpoint.config)
    except InvalidInputError:
        return  # dense, or a family that only transformers knows
    ExpertReader(checkpoint, architecture)


def _forget_aliases(model: "PreTrainedModel", renamed: Mapping[str, str]) -> None:
    """Let the model be saved under the hub's names, not under those of the files."""
    if rules := getattr(model, "_weight_conversions", None):
        aliases_alone = [[alias] for alias in renamed]
        model._weight_conversions = [rule for rule in rules if list(rule.source_patterns) not in aliases_alone]
