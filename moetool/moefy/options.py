"""Options of MoEfication and G-MoEfication, which split a dense model's neurons into experts."""

from typing import Literal

from pydantic import Field

from moetool.checkpoint.sizes import Part
from moetool.convert.stage import ConversionOptions
from moetool.job.options import TEXTS, Listed


class MoefyOptions(ConversionOptions):
    """Options of moefying: how neurons are split into experts, and which are computed."""

    experts: int | None = Field(
        None, ge=2, description="Experts per layer, each the same number of neurons (default: every neuron is one by "
        "itself; 64, if others choose than a projection)."
    )  # fmt: skip
    keep: Part = Field(0.75, gt=0, le=1, description="Share of the experts that one token uses; may be changed later.")
    layers: Listed = Field("all", description="Layers to split: all, every:N, or a list such as 0,4,8.")
    selector: Literal["projection", "mlp", "oracle", "random"] | None = Field(
        None, description="What chooses: a projection of the FFN itself, which is computed for all neurons; a small "
        "trained network; the true scores (no faster, for comparison); or chance, once for all tokens (default: a "
        "projection; a network, if --experts or --as-published is given)."
    )  # fmt: skip
    baseline: Literal["none", "snip"] = Field(
        "none", description="Instead of experts keep the single neurons that matter most to the loss (SNIP)."
    )
    as_published: bool = Field(
        False, description="Make experts of neurons with like weights, and train networks to choose among them; "
        "train selectors on scores relative to the largest, not to the least that is chosen; fill in means over all "
        "tokens, not over those that do without a neuron at this --keep."
    )  # fmt: skip
    epochs: int = Field(30, ge=1, description="Passes of a selector's training.")
    selector_tokens: int = Field(32768, ge=1, description="Most tokens that a selector is trained on.")
    calibration: Listed | None = Field(None, description=f"Text for activations and selectors: {TEXTS}.")
    samples: int = Field(128, ge=1, description="Windows of calibration text.")
