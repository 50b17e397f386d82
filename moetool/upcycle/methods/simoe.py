"""SIMoE: a dense model that finds its experts, and where to put them, while it is tuned."""

from typing import Any, ClassVar

from pydantic import Field

from moetool.convert.parts import Converted
from moetool.convert.stage import Conversion, ConversionOptions
from moetool.job.job import DenseSource, Job
from moetool.job.options import RunOptions
from moetool.upcycle.simoe import Interpolated


class SimoeOptions(ConversionOptions):
    """How many experts."""

    experts: int = Field(8, ge=2, description="Masks per linear layer.")
    router_width: int = Field(64, ge=1, description="Width of the router's hidden layer.")
    sparsity: float = Field(0.75, ge=0, lt=1, description="Share of the masks' elements that tuning is to close.")


class Simoe(Conversion[SimoeOptions]):
    """Sparse Interpolated Mixture-of-Experts: a shared difference on every linear layer, and masks as experts."""

    name: ClassVar[str] = "simoe"
    summary: ClassVar[str] = "masks on one shared difference per linear layer; training finds which and where"
    options_type: ClassVar[type[RunOptions]] = SimoeOptions
    method_of: ClassVar[str | None] = "upcycle"

    def planned(self) -> Interpolated:
        options = self.options
        return Interpolated(
            dense=self.dense,
            dtype=self.new_dtype,
            seed=options.seed,
            experts=options.experts,
            router_width=options.router_width,
            sparsity=options.sparsity,
        )

    def converted(self, job: Job[DenseSource]) -> Converted:
        return self.planned()

    def details(self) -> dict[str, Any]:
        dense, left = self.dense, 1 - self.options.sparsity
        return {
            "experts": self.options.experts,
            "parameters_after_tuning": dense.parameters + round(left * self.planned().linear_parameters),
            "parameters_as_published": simoe_parameters(dense.parameters, self.options.sparsity),
        }

    def notes(self, config: dict[str, Any]) -> list[str]:
        return [
            "tune closes masks and leaves out what no expert needs; until then the file is as large as two models",
            "only transformers, after `import moetool`, runs interpolated experts",
        ]


def simoe_parameters(dense: int, sparsity: float) -> int:
    """Parameters of a SIMoE model as its Table 3 counts them: the share of open mask elements of all the dense model's
    numbers, embeddings too, although only linear layers have masks and columns stay if any expert needs them."""
    return dense + round((1 - sparsity) * dense)
