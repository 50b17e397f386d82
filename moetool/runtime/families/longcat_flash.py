"""LongCat-Flash's experts (arXiv:2509.01322), of which some have no matrices and give back what they are given."""

from typing import Any

from torch import nn
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts

from moetool.runtime.families import take_the_place


class ExpertsWithMatrices(LongcatFlashExperts):
    """LongCat-Flash's experts as published files have them.

    transformers 5.24.0 wants gate and up of those that give back their inputs, too, which it does not use, and so does
    not load any of these models.
    """

    gate_up_proj: nn.Parameter | None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if self.gate_up_proj is not None:
            self.gate_up_proj = nn.Parameter(self.gate_up_proj[: self.num_routed_experts].detach().clone())


take_the_place(LongcatFlashExperts, ExpertsWithMatrices)
