"""Options of an export to GGUF, and what its result tells."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self, get_args

from pydantic import Field, model_validator

from moetool.checkpoint.sizes import ByteSize
from moetool.format.gguf.blocks import MIXTURES, MixtureName, NumberType
from moetool.format.gguf.words import TENSOR_TYPES, layer_in_file, layer_of
from moetool.job.options import RunOptions, TextOptions
from moetool.job.result import Details, Printed


class ExportGgufOptions(RunOptions, TextOptions):
    """The types of numbers, what the tokenizer is called, and on which text llama-quantize is helped, if on any."""

    type: Literal[NumberType, MixtureName] | None = Field(
        None,
        description="Type of all weights (default: f16, or with --size or --target-bpw chosen for each tensor). "
        "Routers and norms are always fp32, embeddings and head have 8 bits at least; with --calibration the codes of "
        "q8_0 and below are chosen to lose least on the text. A mixture of llama-quantize, such as q4_k_m, is "
        "--target-bpw with the bits that llama.cpp documents for it.",
    )
    experts_type: NumberType | None = Field(None, description="Type of the routed experts (default: as --type).")
    size: ByteSize | None = Field(
        None,
        description="Largest size of the file, e.g. 12GB: every tensor gets the type in which least is lost on the "
        "text (--calibration, or else the bundled one). Usually the best choice.",
    )
    pre_tokenizer: str | None = Field(
        None,
        description="llama.cpp's name of how the tokenizer cuts a text, where moetool does not know it from its rules.",
    )
    target_bpw: float | None = Field(
        None,
        gt=0,
        description="Instead of --size: so many bits per weight in all. With --type f16 and --calibration nothing is "
        f"quantized, but {TENSOR_TYPES} written, which has llama-quantize give every tensor a type.",
    )

    @model_validator(mode="after")
    def _one_choice(self) -> Self:
        if self.size is not None and self.target_bpw is not None:
            raise ValueError("give --size or --target-bpw, not both")
        if self.size is not None and self.type is not None:
            raise ValueError("--size chooses a type for every tensor: leave out --type")
        if self.target_bpw is not None and self._bits_of_mixture is not None:
            raise ValueError(f"--type {self.type} stands for --target-bpw {self._bits_of_mixture:g}: give one of them")
        if self.experts_type is not None and self.chooses_types:
            chooser = "--size" if self.size is not None else "--target-bpw"
            given = chooser if self.type is None else f"--type {self.type}"
            raise ValueError(f"{given} chooses a type for every tensor: leave out --experts-type")
        return self

    @property
    def number_type(self) -> NumberType | None:
        """Type of all weights; `None` where it is left to moetool or chosen for each tensor."""
        return next((own for own in get_args(NumberType) if own == self.type), None)

    @property
    def bits_per_weight(self) -> float | None:
        """Bits per weight in all, as asked for by their number or by the name of a mixture."""
        return self.target_bpw or self._bits_of_mixture

    @property
    def _bits_of_mixture(self) -> float | None:
        return next((bits for name, bits in MIXTURES.items() if name == self.type), None)

    @property
    def chooses_types(self) -> bool:
        """Whether every tensor is coded in a type that is chosen for it."""
        return self.number_type is None and (self.size is not None or self.bits_per_weight is not None)


@dataclass(frozen=True, kw_only=True)
class GgufDetails(Details):
    """Result of an export to GGUF in chosen types.

    Attributes:
        bits_per_weight: of all tensors, as llama.cpp counts them.
        types: type of each tensor, by name.
    """

    bits_per_weight: float | None = None
    types: Mapping[str, str] | None = None


@dataclass(frozen=True)
class LayerTypes(Printed):
    """Types of the tensors of a layer, by their names in it."""

    types: Mapping[str, str]


def layer_types(types: Mapping[str, str]) -> dict[int, LayerTypes]:
    """Types of the tensors in each layer of a file, given those of all of its tensors by name."""
    found = defaultdict[int, dict[str, str]](dict)
    for name, number in types.items():
        if (layer := layer_of(name)) >= 0:
            found[layer][name.removeprefix(layer_in_file(layer, ""))] = number
    return {layer: LayerTypes(own) for layer, own in sorted(found.items())}
