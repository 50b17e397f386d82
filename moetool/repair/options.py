"""Options of `moetool repair`: the original model, the text, what is trained and for how many steps."""

from typing import Literal

from pydantic import Field

from moetool.checkpoint.sizes import Part
from moetool.job.options import RunOptions, TextOptions

Trained = Literal["routers", "small", "lora", "all"]
# By default: rates of the small tensors and of all, and weights of the routers' divergence. With all experts it so
# comes to two or three times that of predictions; where fewer are left it tells less.
RATE, RATE_IN_FULL = 0.002, 0.003
# Up to so many layers. Adam moves all by as much, and what they change adds up: in more layers each moves by less.
RATE_LAYERS = 8
RANK = 16  # of what is added to a matrix
ROUTING, ROUTING_OF_FEWER = 80.0, 20.0


class RepairOptions(RunOptions, TextOptions):
    """Options of repair: towards which model, on which text, for how many steps and at which rate."""

    to: str = Field(description="The model that the input was made of: a directory or hub id.")
    train: Literal["auto", "routers", "small", "lora", "all"] = Field(
        "auto",
        description="What changes. routers: these alone, as in Router KD. small: norms, biases, routers, scales, "
        "factors, bases, and values in place of skipped neurons. lora: these, and low-rank updates of attention and "
        "experts that are stored in full, which become part of them. all: these, attention and experts that are stored "
        "in full. auto: where there are such experts, as after reap or in a moefied model, all, or lora if all takes "
        "more than --memory; else small.",
    )
    steps: int = Field(60, ge=1, description="Optimizer steps.")
    batch_size: int = Field(4, ge=1, description="Windows per step.")
    learning_rate: float | None = Field(
        None,
        gt=0,
        description="Peak of the schedule, relative to the root mean square of each trained tensor "
        f"[default: {RATE:g}; {RATE_IN_FULL:g} where experts in full are trained; in models of more than {RATE_LAYERS} "
        f"layers {RATE_LAYERS} / layers times that].",
    )
    routing: float | None = Field(
        None,
        ge=0,
        description="Weight of the KL divergence of the routers' choices, the mean over layers, beside that of "
        f"predictions [default: {ROUTING:g}; {ROUTING_OF_FEWER:g} where experts were left out].",
    )
    warmup: Part = Field(0.1, ge=0, lt=1, description="Share of the steps in which the rate rises; then it falls.")
    held_out: int = Field(
        16,
        ge=1,
        description="Windows that are not trained on, of the calibration text and as many of the bundled text.",
    )
    evaluations: int = Field(4, ge=1, description="Evaluations on held-out windows, the last after the last step.")
    top_logits: int = Field(
        1024, ge=1, description="The original's likeliest tokens that are compared one by one; the others are one sum."
    )
