"""Options of `moetool tune`: data, what is trained, router losses and the schedule."""

from typing import ClassVar, Literal

from pydantic import Field

from moetool.calibration.opening import BOS_HELP, Bos
from moetool.checkpoint.sizes import Part
from moetool.job.options import Listed, Options, RunOptions

TASK_SHARE = 0.2  # the paper's threshold for ESFT-Token
LORA_ALPHA = 16.0
LORA_RANK = 16
TUNE_RATE = 2e-5
LORA_RATE = 2e-4
SCALES_TIMES = 10.0  # measured: as much as low-rank factors take
LEAST_MASK_STEPS = 4  # with fewer, a step at the default rate is as long as the way from an open mask to a closed one
TEACHER_SHARE = 0.5
BALANCE = 0.01


class TrainedOptions(Options):
    """Options that say which parameters learn, and in which form."""

    group: ClassVar[str] = "What is trained"

    train: Literal["auto", "all", "experts", "task-experts", "lora"] = Field(
        "auto",
        description="What changes: everything, or experts and routers (auto: these where they are few parameters), or "
        "only the experts that the examples use most (ESFT), or low-rank factors of all matrices (LoRA) and routers.",
    )
    task_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="With --train task-experts: of each layer the fewest experts learn that get this share of the "
        f"choices of the examples' tokens [default: {TASK_SHARE}].",
    )
    freeze_shared: bool = Field(False, description="Of experts that are deltas to a base, leave the base alone.")
    lora_rank: int | None = Field(
        None, ge=1, description="Train LoRA factors of this rank on the linear layers that --train leaves frozen, and "
        f"merge them at the end [default: none; {LORA_RANK} with --train lora]."
    )  # fmt: skip
    lora_alpha: float | None = Field(
        None, gt=0, description=f"With LoRA: the factors count alpha / rank times [default: {LORA_ALPHA:g}]."
    )
    quantize_base: Literal["none", "nf4", "int8"] = Field(
        "none", description="While others are trained, hold frozen linear layers quantized (QLoRA, by bitsandbytes)."
    )

    @property
    def rank(self) -> int | None:
        """Rank of low-rank factors: what was given, or the default; `None` where there are none."""
        return LORA_RANK if self.lora_rank is None and self.train == "lora" else self.lora_rank


class BalanceOptions(Options):
    """Options of what keeps the experts of an MoE model in equal use."""

    group: ClassVar[str] = "Balance of experts"

    balance: float | None = Field(
        None,
        ge=0,
        description="Weight of the load-balancing loss, which is 1 for even routing and E at worst [default: "
        f"{BALANCE}; 0 with --balance-bias].",
    )
    balance_bias: float | None = Field(
        None,
        gt=0,
        description="In families whose routers have a bias that only the choice of experts sees (DeepSeek-V3 …): by "
        "how much it moves per step, up for experts chosen less often than the mean. 0.001 is usual.",
    )
    z: float = Field(0.0, ge=0, description="Weight of the router z-loss; 0.001 is usual.")

    @property
    def balance_weight(self) -> float:
        """Weight of the load-balancing loss: what was given, or the default."""
        if self.balance is not None:
            return self.balance
        return BALANCE if self.balance_bias is None else 0.0


class TeacherOptions(Options):
    """Options of learning from a teacher's predictions beside the examples."""

    group: ClassVar[str] = "Distillation"

    teacher: str | None = Field(
        None,
        description="A model with the same tokenizer, a directory or hub id, whose predictions are learnt, too "
        "(distillation). It stays in memory.",
    )
    teacher_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of the loss that is the divergence from the teacher's predictions; the rest is that of the "
        f"text [default: {TEACHER_SHARE}].",
    )


class MaskOptions(Options):
    """Options of a model that `upcycle --method simoe` made; no other has masks."""

    group: ClassVar[str] = "Models of upcycle --method simoe"

    mask_learning_rate: float | None = Field(
        None, gt=0, description="Of SIMoE's masks [default: so that one can close in a third of the steps]."
    )
    multiplier_rate: float | None = Field(
        None, gt=0, description="How fast SIMoE's Lagrangian multiplier rises, per step and missing share of zeros "
        "[default: 4 / steps]."
    )  # fmt: skip
    overlap: float = Field(5e-6, ge=0, description="Weight of what SIMoE's masks have in common.")
    sample_masks: bool = Field(False, description="Draw SIMoE's masks in every step instead of taking their medians.")


class LogOptions(Options):
    """Options of what is told and kept while a model is trained."""

    group: ClassVar[str] = "Log and checkpoints"

    eval_every: int | None = Field(None, ge=1, description="Steps between evaluations [default: at the end].")
    save_every: int = Field(100, ge=1, description="Steps between checkpoints that --resume goes on from.")
    log_every: int = Field(10, ge=1, description="Steps between lines of log.")
    report_to: Listed = Field(
        "none", description="wandb, tensorboard … as transformers knows them; several with commas."
    )


class TuneOptions(LogOptions, MaskOptions, TeacherOptions, BalanceOptions, TrainedOptions, RunOptions):
    """Options of `moetool tune`: the examples and the schedule; what is trained, router losses and all else above."""

    data: Listed = Field(
        description="Examples: .jsonl or .parquet with messages, prompt and completion, text or content; a .txt file; "
        "a hub data set name[:config[:split]]; several with commas."
    )
    eval_data: Listed | None = Field(None, description="Held-out examples to measure the loss on, named as for --data.")
    sequence_length: int = Field(1024, ge=2, description="Tokens per row; longer examples are cut.")
    bos: Bos = Field("auto", description=f"{BOS_HELP} Chat templates say so themselves.")
    packing: bool = Field(True, description="Several short examples in one row, none of which sees another.")
    epochs: float = Field(1.0, gt=0, description="Passes over the data, unless --steps says how long.")
    steps: int | None = Field(None, ge=1, description="Optimizer steps.")
    batch_size: int = Field(8, ge=1, description="Rows per step and device.")
    accumulation: int = Field(1, ge=1, description="Batches per optimizer step.")
    learning_rate: float | None = Field(
        None,
        gt=0,
        description=f"Peak of the schedule; scales of codes take {SCALES_TIMES:g} times that, but with --train lora as "
        f"much [default: {TUNE_RATE:g}; {LORA_RATE:g} with --train lora, and where only low-rank factors, PESC's "
        "adapters and routers are trained].",
    )
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="How the learning rate falls.")
    warmup: Part = Field(0.03, ge=0, lt=1, description="Share of the steps in which it rises.")
    weight_decay: float = Field(0.0, ge=0, description="Of AdamW.")
    gradient_checkpointing: bool = Field(False, description="Less memory for a third more time.")
    bf16: bool = Field(False, description="Compute in bfloat16; weights stay in fp32 while they are trained.")
    seed: int = Field(0, ge=0, lt=2**63, description="Order of the data.")

    @property
    def scales_times(self) -> float:
        """How many times the rate of weights scales of codes are trained at: low-rank factors' rate is theirs, too."""
        return 1.0 if self.train == "lora" else SCALES_TIMES
