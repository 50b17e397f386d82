"""Options of an export to MLX, and what its result tells."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from moetool.checkpoint.sizes import ByteSize
from moetool.export.coded_experts import CodedExpertsOptions
from moetool.format.mlx import AFFINE_BITS
from moetool.job.result import Details, Printed


class ExportMlxOptions(CodedExpertsOptions):
    """Options of the export to MLX: bits of experts and of all else, or the size that these are chosen for; and the
    text on which codes are chosen, if any."""

    bits: int | None = Field(
        None,
        description=f"Bits of every number of an expert: {', '.join(map(str, AFFINE_BITS))} (default: 4, or with "
        "--size or --target-bpw chosen for each layer and role).",
    )
    group_size: Literal[32, 64, 128] = Field(64, description="Inputs that share a scale and a bias.")
    other_bits: Literal[4, 5, 6, 8, 16] | None = Field(
        None,
        description="Bits of attention, dense FFNs, shared experts, embeddings and head (default: 8, or with --size or "
        "--target-bpw chosen for each matrix); 16 leaves them as they are.",
    )
    size: ByteSize | None = Field(
        None,
        description="Largest size of the weight files, e.g. 12GB: every matrix gets the bits in which least is lost on "
        "the text (--calibration, or else the bundled one). Usually the best choice.",
    )
    target_bpw: float | None = Field(None, gt=0, description="Instead of --size: so many bits per weight in all.")

    @field_validator("bits")
    @classmethod
    def _packed(cls, bits: int | None) -> int | None:
        if bits is not None and bits not in AFFINE_BITS:
            raise ValueError(f"there are {', '.join(map(str, AFFINE_BITS))}, not {bits}")
        return bits

    @model_validator(mode="after")
    def _one_choice(self) -> Self:
        if self.size is not None and self.target_bpw is not None:
            raise ValueError("give --size or --target-bpw, not both")
        if self.chooses_bits and (self.bits is not None or self.other_bits is not None):
            chooser = "size" if self.size is not None else "target-bpw"
            given = "bits" if self.bits is not None else "other-bits"
            raise ValueError(f"--{chooser} chooses bits for every matrix: leave out --{given}")
        return self

    @property
    def chooses_bits(self) -> bool:
        """Whether every matrix has bits that are chosen for it."""
        return self.size is not None or self.target_bpw is not None


@dataclass(frozen=True, kw_only=True)
class MlxDetails(Details):
    """Result of an export to MLX in chosen bits.

    Attributes:
        bits_per_weight: of all tensors.
        bits: of each matrix, or of the matrices of all experts of a layer and role, by module.
    """

    bits_per_weight: float | None = None
    bits: Mapping[str, int] | None = None


@dataclass(frozen=True)
class MatrixBits(Printed):
    """Bits of the matrices of a layer, by their modules in it."""

    types: Mapping[str, str]
