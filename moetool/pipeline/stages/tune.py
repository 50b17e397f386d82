"""Instruction-tuning of a mixture of experts, or of any causal language model."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from moetool.calibration.data import check_vocabulary, load_tokenizer, parse_data
from moetool.checkpoint.files import patch_config
from moetool.checkpoint.format import check_unquantised, moetool_entry
from moetool.checkpoint.manifest import read_manifest
from moetool.checkpoint.reader import MANIFEST, Checkpoint
from moetool.checkpoint.writer import TensorSpec
from moetool.errors import InvalidInputError, UsageError
from moetool.pipeline.blueprint import layer_of
from moetool.pipeline.job import Job
from moetool.pipeline.options import RunOptions
from moetool.pipeline.output import ShardPlan, write_checkpoint
from moetool.pipeline.plan import Plan
from moetool.pipeline.processes import is_first_process, processes
from moetool.pipeline.progress import phase
from moetool.pipeline.stage import Stage


@dataclass(frozen=True)
class AnySource:
    """Any causal language model that transformers loads."""

    checkpoint: Checkpoint

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "AnySource":
        check_unquantised(checkpoint.config)
        return cls(checkpoint)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most of its numbers."""
        sizes: dict[torch.dtype, int] = {}
        for info in self.checkpoint.tensors.values():
            sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
        return max(sizes, key=lambda dtype: sizes[dtype])


class TuneOptions(RunOptions):
    """On what, for how long, and what may change."""

    data: str = Field(
        description="Examples: .jsonl or .parquet with messages, prompt and completion, or text; a .txt file; a hub "
        "data set name[:config[:split]]; several with commas."
    )
    eval_data: str | None = Field(None, description="The same, to measure the loss on while training.")
    sequence_length: int = Field(1024, ge=2, description="Tokens per row; longer examples are cut.")
    packing: bool = Field(True, description="Several short examples in one row, none of which sees another.")
    epochs: float = Field(1.0, gt=0, description="Passes over the data, unless --steps says how long.")
    steps: int | None = Field(None, ge=1, description="Optimizer steps.")
    batch_size: int = Field(8, ge=1, description="Rows per step and device.")
    accumulation: int = Field(1, ge=1, description="Batches per optimizer step.")
    learning_rate: float = Field(2e-5, gt=0, description="Peak of the schedule.")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="How the learning rate falls.")
    warmup: float = Field(0.03, ge=0, lt=1, description="Share of the steps in which it rises.")
    weight_decay: float = Field(0.0, ge=0, description="Of AdamW.")
    balance: float = Field(
        0.01, ge=0, description="Weight of the load-balancing loss, which is 1 for even routing and E at worst."
    )
    z: float = Field(0.0, ge=0, description="Weight of the router z-loss; 0.001 is usual.")
    train: Literal["auto", "all", "experts"] = Field(
        "auto", description="What changes: everything, or experts and routers (auto: these for differences to a base)."
    )
    freeze_shared: bool = Field(False, description="Of experts that are differences to a base, leave the base alone.")
    gradient_checkpointing: bool = Field(False, description="Less memory for a third more time.")
    bf16: bool = Field(False, description="Compute in bfloat16; weights stay in fp32 while they are trained.")
    eval_every: int | None = Field(None, ge=1, description="Steps between evaluations [default: at the end].")
    save_every: int = Field(100, ge=1, description="Steps between checkpoints that --resume goes on from.")
    log_every: int = Field(10, ge=1, description="Steps between lines of log.")
    report_to: str = Field("none", description="wandb, tensorboard … as transformers knows them.")
    seed: int = Field(0, ge=0, lt=2**63, description="Order of the data.")


class Tune(Stage[TuneOptions, AnySource]):
    """Full fine-tuning by transformers' Trainer, with router losses that are active."""

    name: ClassVar[str] = "tune"
    summary: ClassVar[str] = "fine-tune on instructions or text, with a load-balancing loss"
    options_type: ClassVar[type[RunOptions]] = TuneOptions
    source_type: ClassVar[type[Any]] = AnySource
    is_parallel: ClassVar[bool] = True

    def plan(self) -> Plan:
        if self.options.freeze_shared and self.options.train == "all":
            raise UsageError("--freeze-shared leaves the base alone, --train all does not: give one of them.")
        checkpoint = self.source.checkpoint
        numbers = sum(math.prod(info.shape) for info in checkpoint.tensors.values())
        options, config = self.options, checkpoint.config
        few = options.train == "experts" or (
            options.train == "auto" and bool((moetool_entry(config) or {}).get("layers"))
        )
        trained = sum(
            math.prod(info.shape)
            for name, info in checkpoint.tensors.items()
            if not few or ".experts." in name or name.endswith(("gate.weight", "router.layer.weight"))
        )
        tokens = options.batch_size * options.sequence_length
        logits = 3 * 4 * tokens * int(config.get("vocab_size", 0))
        layers = int(config.get("num_hidden_layers", 1))
        width = int(config.get("hidden_size", 0))
        kept = 2 * layers + 60 if options.gradient_checkpointing else 40 * layers
        return Plan(
            stage=self.name,
            input_bytes=checkpoint.weight_bytes,
            output_bytes=checkpoint.weight_bytes,
            scratch_bytes=2 * (4 * numbers + 8 * trained),  # a checkpoint, and the one that replaces it
            memory_bytes=600_000_000 + 4 * numbers + 12 * trained + logits + 4 * tokens * width * kept,
            details={"parameters": numbers, "tokens_per_step": tokens * options.accumulation},
        )

    def reads(self) -> list[Path]:
        specs = [spec for text in (self.options.data, self.options.eval_data) if text for spec in parse_data(text)]
        return [path for spec in specs if (path := Path(spec.source).expanduser()).exists()]

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self.source.checkpoint.path)

    def run(self, job: Job[AnySource]) -> dict[str, Any]:
        from moetool.training.examples import load_examples

        options = self.options
        examples = load_examples(options.data, self._tokenizer, options.sequence_length)
        held_out = (
            load_examples(options.eval_data, self._tokenizer, options.sequence_length) if options.eval_data else None
        )
        for example in (*examples.items, *(held_out.items if held_out else ())):
            check_vocabulary(torch.tensor(example.ids), int(self.source.checkpoint.config["vocab_size"]))
        job.progress.log(f"{len(examples.items)} examples with {examples.answer_tokens} tokens to learn.")
        if examples.truncated:
            job.progress.log(
                f"{examples.truncated} are longer than {options.sequence_length} tokens and lost their end."
            )
        if examples.silent:
            job.progress.log(f"{examples.silent} have nothing to learn and were left out.")
        model = self._load(self.source.checkpoint.path)
        trained = self._choose(model)
        if job.unit("data"):  # from here on there may be a checkpoint to go on with
            if is_first_process():
                (job.work / "examples").write_text(examples.digest())
            job.finish("data")
        elif (job.work / "examples").read_text() != examples.digest():
            raise UsageError("The data has changed since this run began. Start again with --overwrite.")
        told = self._train(job, model, examples.items, held_out.items if held_out else None)
        if not is_first_process():
            return {}
        self._write(job, model)
        return {
            "examples": len(examples.items),
            "truncated": examples.truncated,
            "left_out": examples.silent,
            "answer_tokens": examples.answer_tokens,
            "trained_parameters": trained,
            **told,
        }

    def _load(self, path: Path) -> Any:
        from transformers import AutoModelForCausalLM

        from moetool.integrations.quiet import quiet

        try:
            with quiet():
                return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, trust_remote_code=False)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise InvalidInputError(f"transformers cannot load {path}: {' '.join(str(error).split())[:300]}") from error

    def _choose(self, model: Any) -> int:
        """Let what is to be trained require gradients, and nothing else; returns how many numbers that is."""
        from moetool.modules.experts import SharedBaseExperts
        from moetool.modules.insertion import Routed
        from moetool.training.balance import Routers

        shared = [module for module in model.modules() if isinstance(module, SharedBaseExperts)]
        if self.options.freeze_shared and not shared:
            raise UsageError("--freeze-shared: this model's experts are no differences to a base.")
        experts_only = self.options.train == "experts" or (self.options.train == "auto" and bool(shared))
        if experts_only:
            routers = Routers(model).modules
            if not routers:
                raise UsageError("--train experts: this model has none. Upcycle it first.")
            model.requires_grad_(False)
            for name, module in model.named_modules():
                if module in routers or name.endswith(".experts") or isinstance(module, Routed):
                    module.requires_grad_(True)
        if self.options.freeze_shared:
            for module in shared:
                module.gate_up_proj.requires_grad_(False)
                module.down_proj.requires_grad_(False)
        for parameter in model.parameters():
            if tuple(parameter.shape) == (1, 1) or not parameter.is_floating_point():
                parameter.requires_grad_(False)  # a guard
        return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

    def _train(
        self, job: Job[AnySource], model: Any, examples: list[Any], held_out: list[Any] | None
    ) -> dict[str, Any]:
        from transformers import TrainingArguments

        from moetool.integrations.quiet import quiet
        from moetool.training.balance import Routers
        from moetool.training.examples import collate, pack
        from moetool.training.trainer import MixtureTrainer, Told, keeps_apart, last_checkpoint, recompute_activations

        options, work = self.options, job.work / "trainer"
        packs = options.packing and keeps_apart(model)
        if options.packing and not packs:
            job.progress.log("In this family examples that share a row would see each other: each gets its own.")
        rows = pack(examples, options.sequence_length) if packs else [[example] for example in examples]
        batches = math.ceil(len(rows) / (options.batch_size * processes()))
        per_epoch = math.ceil(batches / options.accumulation)
        steps = options.steps or math.ceil(per_epoch * options.epochs)
        text = model.config.get_text_config()
        top_k = int(getattr(text, "num_experts_per_tok", 0) or _own_top_k(model) or 1)
        if options.gradient_checkpointing:
            recompute_activations(model)
        with quiet():
            arguments = TrainingArguments(
                output_dir=str(work),
                per_device_train_batch_size=options.batch_size,
                per_device_eval_batch_size=options.batch_size,
                gradient_accumulation_steps=options.accumulation,
                num_train_epochs=options.epochs,
                max_steps=options.steps or -1,
                learning_rate=options.learning_rate,
                lr_scheduler_type=options.schedule,
                warmup_steps=math.ceil(options.warmup * steps),
                weight_decay=options.weight_decay,
                bf16=options.bf16,
                seed=options.seed % 2**32,
                data_seed=options.seed % 2**32,
                use_cpu=job.device.type == "cpu",
                save_strategy="steps",
                save_steps=options.save_every,
                save_total_limit=1,
                eval_strategy="steps" if held_out and options.eval_every else "no",
                eval_steps=options.eval_every,
                logging_strategy="steps",
                logging_steps=options.log_every,
                report_to=options.report_to,
                disable_tqdm=True,
                remove_unused_columns=False,
                label_names=["labels"],
                prediction_loss_only=True,
                average_tokens_across_devices=True,
                ddp_backend="gloo" if processes() > 1 and job.device.type == "cpu" else None,
                ddp_find_unused_parameters=True if processes() > 1 else None,  # an expert may be given no token
            )
            if processes() == 1:
                arguments._n_gpu = min(arguments.n_gpu, 1)  # or it would split batches over all cards, by threads
            with arguments.main_process_first(local=False):
                last, done = last_checkpoint(work)
            told = Told(job.progress.advance, job.progress.log, lambda: job.interrupt.requested)
            with phase(job.progress, "Train", steps - done):
                trainer = MixtureTrainer(
                    model=model,
                    args=arguments,
                    train_dataset=rows,
                    eval_dataset=[[example] for example in held_out] if held_out else None,
                    data_collator=lambda batch: collate(batch, padding=0),
                    callbacks=[told],
                    routers=Routers(model),
                    top_k=top_k,
                    balance=options.balance,
                    z=options.z,
                )
                trainer.remove_callback(_printer())
                if done < steps:
                    trainer.train(resume_from_checkpoint=str(last) if last else None)
                elif last is not None:  # stopped after the last step; the Trainer would go one further
                    model.load_state_dict(self._load(last).state_dict())
            job.interrupt.check()
            found: dict[str, Any] = {"steps": steps}
            if held_out:
                loss = trainer.evaluate()["eval_loss"]
                found |= {"eval_loss": round(loss, 6), "eval_perplexity": round(math.exp(min(loss, 700)), 4)}
        return found

    def _write(self, job: Job[AnySource], model: Any) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        source = self.source.checkpoint
        state = model.to("cpu").state_dict()
        for tied in getattr(model, "all_tied_weights_keys", None) or {}:
            if tied not in source.tensors:
                state.pop(tied, None)
        tensors: dict[str, Tensor] = dict(revert_weight_conversion(model, state))
        units: dict[str, list[TensorSpec]] = {}
        for name, tensor in sorted(tensors.items()):
            dtype = source.tensors[name].dtype if name in source.tensors else self.source.dtype
            units.setdefault(layer_of(name), []).append(TensorSpec(name, dtype, tuple(tensor.shape)))
        order = list(units)

        def made(unit: int) -> Iterator[tuple[str, Tensor]]:
            for spec in units[order[unit]]:
                yield spec.name, tensors[spec.name].to(spec.dtype)

        if (source.path / MANIFEST).exists():
            before = read_manifest(source.path).statistics
            job.record.update({key: before[key] for key in ("upcycled",) if key in before})
        plan = ShardPlan(((index, units[unit]) for index, unit in enumerate(order)), self.options.shard_size)
        write_checkpoint(job, plan, made, config=patch_config(source.config), seed=self.options.seed)

    def verify(self, output: Path) -> dict[str, Any]:
        made, source = Checkpoint.open(output), self.source.checkpoint
        lost = [name for name in source.tensors if name not in made.tensors and "inv_freq" not in name]
        if lost:
            raise InvalidInputError(f"{output} lacks {len(lost)} tensors of {source.path}, the first {lost[0]}.")
        return {"bytes_before": source.weight_bytes, "bytes_after": made.weight_bytes}


def _own_top_k(model: Any) -> int | None:
    from moetool.modules.insertion import Routed

    return next((module.top_k for module in model.modules() if isinstance(module, Routed)), None)


def _printer() -> Any:
    from transformers.trainer_callback import PrinterCallback

    return PrinterCallback
