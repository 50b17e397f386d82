"""Instruction-tuning of an MoE model, or of any causal language model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from moetool.architectures.base import whole_number
from moetool.architectures.dense import check_predicts, is_encoder
from moetool.calibration.comparable import check_comparable
from moetool.calibration.data import check_data, parse_data
from moetool.calibration.mixing import text_bytes
from moetool.calibration.opening import opening_text
from moetool.calibration.windows import check_tokens, load_tokenizer
from moetool.checkpoint.files import patch_config
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.settings import described_in
from moetool.costs.calibration_cost import baseline
from moetool.errors import InvalidInputError, UsageError, VerificationError
from moetool.format.entry import check_unquantized, custom_entry
from moetool.format.kinds import custom_module
from moetool.job.blueprint import open_for_planning
from moetool.job.job import DenseSource, Input, Job
from moetool.job.options import RunOptions
from moetool.job.plan import Plan, usable_bytes
from moetool.job.processes import processes, sharding
from moetool.job.result import Details, Sizes
from moetool.job.stage import Effect, Stage, found_here
from moetool.runtime.building import check_sizes, in_whole, recomputes
from moetool.runtime.loading import loading_memory
from moetool.tune.checks import check_balance_bias, check_masks, check_options, check_recomputing, trained_by
from moetool.tune.costs import Learning, training_phases, weights_memory
from moetool.tune.low_rank import TOLD_OF_READING, streamed_as
from moetool.tune.options import LEAST_MASK_STEPS, LORA_ALPHA, TASK_SHARE, TEACHER_SHARE, TuneOptions
from moetool.tune.results import TuningResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from moetool.training.changed import ChangedModel
    from moetool.tune.examples import Example, Examples


@dataclass(frozen=True)
class AnySource:
    """Input of `tune`: any causal language model that transformers loads and whose weights are not quantized."""

    checkpoint: Checkpoint

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "AnySource":
        check_unquantized(checkpoint.config)
        if is_encoder(checkpoint.config):
            kind = checkpoint.config["model_type"]
            raise InvalidInputError(f"{checkpoint.source} is an encoder ({kind}); tune trains causal language models.")
        check_predicts(checkpoint.config)
        if not checkpoint.is_imagined:
            checkpoint = in_whole(checkpoint)
            check_sizes(checkpoint)
            DenseSource.if_known(checkpoint)
        return cls(checkpoint)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which most bytes of the weight files are stored."""
        return self.checkpoint.main_dtype


class Tune(Stage[TuneOptions, AnySource]):
    """Fine-tuning by transformers' Trainer, of everything or of what a method trains, with active router losses."""

    name: ClassVar[str] = "tune"
    summary: ClassVar[str] = "fine-tune on instructions or text, with a load-balancing loss"
    options_type: ClassVar[type[RunOptions]] = TuneOptions
    source_type: ClassVar[type[Input]] = AnySource
    is_parallel: ClassVar[bool] = True
    has_trainer: ClassVar[bool] = True
    bfloat16_option: ClassVar[str] = "--bf16"
    effect: ClassVar[Effect] = "trains"

    def plan(self) -> Plan:
        check_options(self.options)
        self._check_teacher()
        self._check_data()
        if (tool := sharding()) is not None:
            self._check_sharding(tool)
        checkpoint = self.source.checkpoint
        check_masks(self.options, checkpoint)
        check_recomputing(self.options, checkpoint)
        check_balance_bias(self.options, checkpoint)
        numbers = sum(math.prod(info.shape) for info in checkpoint.tensors.values())
        options, config = self.options, checkpoint.settings
        learning = self._learning
        tokens = options.batch_size * options.sequence_length
        logits = 3 * 4 * tokens * (whole_number(config, "vocab_size") or 0)
        layers = whole_number(config, "num_hidden_layers") or 1
        width = whole_number(config, "hidden_size") or 0
        again = options.gradient_checkpointing or (learning.changed > 0 and self._runs_again)
        kept = 2 * layers + 60 if again else 40 * layers
        learnt, held_out = _text_bytes(options.data), _text_bytes(options.eval_data)
        examples = 2 * (learnt + held_out)  # 8 bytes per token, of some 4 bytes of text
        per_step = tokens * options.accumulation
        steps = options.steps or math.ceil(options.epochs * learnt / 4 / per_step)
        taught = 0 if self._teacher is None else loading_memory(self._teacher, torch.float32).needed + 2 * logits
        phases = training_phases(
            checkpoint,
            steps * per_step,
            options.sequence_length,
            steps,
            learning.numbers,
            bf16=options.bf16,
            again=again,
            chooses=options.train == "task-experts",
            teacher=self._teacher,
            read=2 * steps * options.accumulation if self._streams else 0,
            held_out=held_out // 4,
            evaluations=1 + (steps // options.eval_every if options.eval_every else 0),
        )
        told = {"weights": TOLD_OF_READING} if self._streams else {}
        stored = numbers if sharding() else learning.numbers
        return Plan(
            stage=self.name,
            input_bytes=checkpoint.weight_bytes,
            output_bytes=checkpoint.weight_bytes + checkpoint.growth(),
            scratch_bytes=2 * (8 * learning.numbers + 4 * stored),  # a checkpoint, and the next
            memory_bytes=baseline()
            + self._weights_memory(streams=self._streams)
            + (logits + 4 * tokens * width * kept + examples + taught),
            phases=phases,
            advice=self._advice,
            details={
                "parameters": numbers,
                "trained_parameters": learning.numbers,
                **({"steps": steps} if steps else {}),
                "tokens_per_step": per_step,
                **told,
            },
        )

    @cached_property
    def _learning(self) -> Learning:
        return trained_by(self.options, self.source.checkpoint)

    @cached_property
    def _streams(self) -> bool:
        """Whether the weights of a layer are read whenever it runs, since with all in memory `--train lora` would take
        more than `--memory`."""
        options, checkpoint = self.options, self.source.checkpoint
        if options.train != "lora" or options.balance_bias is not None or processes() > 1:
            return False
        held = baseline() + self._weights_memory(streams=False)
        return held > usable_bytes(options) and streamed_as(checkpoint) is not None

    def _weights_memory(self, *, streams: bool) -> int:
        checkpoint = self.source.checkpoint
        every = whole_number(checkpoint.settings, "num_hidden_layers") or 1
        layers = every if self._learning.changed and not self._runs_again else 1
        return weights_memory(checkpoint, self._learning, self._held_dtype, layers, streams=streams)

    @cached_property
    def _runs_again(self) -> bool:
        return recomputes(self.source.checkpoint)

    @property
    def _advice(self) -> str:
        smaller = "A smaller --batch-size (with --accumulation) and shorter rows (--sequence-length)"
        if self.options.train == "lora":
            return f"{smaller} need less, and with a model in bf16 --bf16."
        return (
            f"The model is trained whole, in float32. {smaller}, --gradient-checkpointing and --train lora need less."
        )

    @cached_property
    def _teacher(self) -> Checkpoint | None:
        return None if self.options.teacher is None else open_for_planning(self.options.teacher)

    def _check_teacher(self) -> None:
        """Raise unless the teacher, where there is one, predicts what the model does."""
        teacher = self._teacher
        if teacher is not None and not teacher.is_imagined and not self.source.checkpoint.is_imagined:
            check_comparable(teacher, self.source.checkpoint, self._tokenizer)

    def _check_data(self) -> None:
        """Raise `InvalidInputError` for a text whose first record cannot be learnt from."""
        from moetool.tune.examples import check_first

        for text in self.texts():
            check_data(text)
            if not self.source.checkpoint.is_imagined:
                check_first(text, self._tokenizer, self.options.sequence_length, self.options.bos)

    def inputs(self) -> Mapping[str, Checkpoint]:
        return {**super().inputs(), **({} if self._teacher is None else {"teacher": self._teacher})}

    def reads(self) -> list[Path]:
        return [*super().reads(), *found_here([self.options.teacher] if self.options.teacher else [])]

    def _check_sharding(self, tool: str) -> None:
        """Raise `UsageError` for what does not work where processes share one copy of the weights or of their state."""
        from torch.distributed.fsdp import FSDPModule

        if tool == "FSDP 1":
            raise UsageError("tune has not been tried with FSDP 1: set fsdp_version: 2 (FSDP_VERSION=2).")
        if tool == "FSDP 2" and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise UsageError("This version of torch waits for ever for experts without tokens: FSDP needs torch 2.13.")
        if tool == "ZeRO 3":
            raise UsageError("ZeRO 3 fails in the backward pass of moetool's experts: use ZeRO 2, or FSDP 2.")
        if self.options.quantize_base != "none":
            raise UsageError(f"--quantize-base has not been tried with {tool}: leave one of them out.")
        if tool.startswith("ZeRO") and self.options.bf16:
            raise UsageError(f"--bf16: {tool} would hand out weights rounded to bfloat16: use FSDP 2.")
        spec = custom_module(self.source.checkpoint.config)
        if spec is not None and spec.whole is not None:
            raise UsageError(f"{spec.whole} are constrained as a whole, and {tool} has them in parts: train without.")

    def texts(self) -> list[str]:
        return [text for text in (self.options.data, self.options.eval_data) if text is not None]

    def in_bfloat16(self) -> RunOptions | None:
        if self.options.bf16 or self.options.compute_dtype != "auto" or sharding() is not None:
            return None
        return self.options.model_copy(update={"bf16": True})

    @property
    def _held_dtype(self) -> torch.dtype:
        """The dtype in which weights are held that are not trained: with `--train lora --bf16` that of a model in bf16.
        Matrices that it has in fp32 are rounded then, but for routers."""
        keeps = self.options.bf16 and self.options.train == "lora" and self.source.dtype == torch.bfloat16
        return torch.bfloat16 if keeps else torch.float32

    @cached_property
    def _tokenizer(self) -> "PreTrainedTokenizerBase":
        return load_tokenizer(self.source.checkpoint.path)

    def run(self, job: Job[AnySource]) -> Details:
        from moetool.runtime.loading import load_model
        from moetool.tune.masks import all_closed
        from moetool.tune.teacher import Teacher
        from moetool.tune.tuning import mask_rates, train
        from moetool.tune.writing import round_as_written, write_changed, write_trained

        examples, held_out = self._examples(job)
        model, changed = self._open(job)
        trained = self._prepare(job, model, examples.items)
        if job.unit("data"):  # from here on there may be a checkpoint to go on with
            job.finish("data", told={"examples": examples.digest(), "processes": processes()})
        elif job.ranks.is_first:
            _check_begun(job.workspace.told("data"), examples)
        held, teacher = held_out.items if held_out else None, None
        if self._teacher is not None:
            share = self.options.teacher_share or TEACHER_SHARE
            teacher = Teacher.of(self._teacher, share, job.device)
        settle = partial(round_as_written, model, changed, self.source.checkpoint, self.source.dtype)
        told, weights = train(job, model, self.options, examples.items, held, teacher, settle)
        if not job.ranks.is_first:
            return Details()
        if told.mask_sparsity is not None and all_closed(model):
            job.workspace.discard()
            mask_rate, multiplier_rate = mask_rates(self.options, told.steps)
            is_short = self.options.mask_learning_rate is None and told.steps < LEAST_MASK_STEPS
            least = f" ({LEAST_MASK_STEPS} at least)" if is_short else ""
            raise VerificationError(
                "All masks have closed: the result would be the model that it was made from. Its work is deleted: "
                f"with these options it could only end so. Start again with more --steps{least}, or with a lower "
                f"--mask-learning-rate or --multiplier-rate (here {told.steps}, {mask_rate:.3g} and "
                f"{multiplier_rate:.3g})."
            )
        if weights is not None:
            model = load_model(self.source.checkpoint, torch.float32)
            self._prepare(job, model, examples.items)
            shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
            model.load_state_dict({name: weights[name].view(shapes[name]) for name in weights}, assign=True)
        source, shard_size = self.source.checkpoint, self.options.shard_size
        if changed is not None:
            write_changed(job, changed, source, patch_config(source.config), shard_size)
        else:
            write_trained(job, model, source, self._finish(model), self.source.dtype, shard_size)
        return TuningResult(
            examples=len(examples.items),
            truncated=examples.truncated,
            left_out=examples.silent,
            answer_tokens=examples.answer_tokens,
            begin=opening_text(self._tokenizer, self.options.bos),
            trained_parameters=trained,
            training=told,
        )

    def _examples(self, job: Job[AnySource]) -> "tuple[Examples, Examples | None]":
        """What is learnt, and what is held out to be evaluated on; says what was left out."""
        from moetool.tune.examples import load_examples

        options, settings = self.options, self.source.checkpoint.settings
        texts = [
            None if text is None else load_examples(text, self._tokenizer, options.sequence_length, options.bos)
            for text in (options.data, options.eval_data)
        ]
        for example in (example for text in texts if text for example in text.items):
            check_tokens(torch.tensor(example.ids), settings)
        examples, held_out = texts
        assert examples is not None
        count = len(examples.items)
        tokens = examples.answer_tokens
        job.progress.log(f"{count} example{'s' * (count != 1)} with {tokens} token{'s' * (tokens != 1)} to learn.")
        if begin := opening_text(self._tokenizer, options.bos):
            job.progress.log(f"All but conversations begin with {begin}.")
        if examples.truncated:
            job.progress.log(
                f"{examples.truncated} are longer than {options.sequence_length} tokens and lost their end."
            )
        if examples.ends_added:
            end = self._tokenizer.eos_token
            job.progress.log(f"The chat template writes nothing that ends an answer: each was given {end}.")
        if examples.silent:
            job.progress.log(f"{examples.silent} have nothing to learn and were left out.")
        return examples, held_out

    def _open(self, job: Job[AnySource]) -> "tuple[PreTrainedModel, ChangedModel | None]":
        """Load the model, or open it for low-rank updates."""
        from moetool.runtime.loading import load_model
        from moetool.tune.low_rank import open_changed
        from moetool.tune.writing import layers_by_name

        checkpoint = self.source.checkpoint
        if self.options.train == "lora":
            changed = open_changed(checkpoint, self.options, self._held_dtype, job.device, streams=self._streams)
            layers_by_name(changed, checkpoint)  # or what was learnt could not be written
            return changed.model, changed
        with described_in(checkpoint.path):
            return load_model(checkpoint, torch.float32), None

    def _prepare(self, job: Job[AnySource], model: "PreTrainedModel", examples: "Sequence[Example]") -> int:
        """Let everything that is to be trained require gradients; returns how many numbers that is."""
        from moetool.tune.choice import choose_for, trained_parameters
        from moetool.tune.lora import add_lora, quantize_linears
        from moetool.tune.task_experts import train_task_experts

        options = self.options
        if options.train == "task-experts":
            return train_task_experts(job, model, examples, options.task_share or TASK_SHARE)
        if options.train != "lora":
            frozen = choose_for(model, options)
            if options.quantize_base != "none":
                quantize_linears(model, frozen, options.quantize_base, job.device)
            if options.lora_rank is not None:
                add_lora(model, frozen, options.lora_rank, options.lora_alpha or LORA_ALPHA, options.seed)
        return trained_parameters(model)

    def _finish(self, model: "PreTrainedModel") -> dict[str, object]:
        """Bring a trained model into the form in which it is written; returns its `config.json`."""
        from moetool.runtime.modules.simoe import sites
        from moetool.runtime.modules.simoe_mixing import interpolation_of
        from moetool.tune.lora import merge_lora

        source = self.source.checkpoint
        if self.options.lora_rank is not None or self.options.quantize_base != "none":
            merge_lora(model, source)  # of a model that was trained in parts
        config = patch_config(source.config)
        interpolation = interpolation_of(model)
        if interpolation is not None and interpolation.trains_masks:
            for site in sites(model).values():
                site.prune()
            del interpolation.multiplier
            spec = custom_module(config)
            assert spec is not None
            settled = spec.settled({name: site.delta.shape[1] for name, site in sites(model).items()})
            config = patch_config(config, {"quantization_config": custom_entry(settled)})
        return config

    def verify(self, output: Path) -> Sizes:
        made, source = Checkpoint.open(output), self.source.checkpoint
        spec = custom_module(made.config)
        closed = () if spec is None else spec.closed
        gone = [name for name in source.tensors if name not in made.tensors and "inv_freq" not in name]
        lost = [name for name in gone if not name.endswith(closed)]
        if lost:
            raise InvalidInputError(f"{output} lacks {len(lost)} tensors of {source.source}, the first {lost[0]}.")
        return Sizes(source.weight_bytes, made.weight_bytes)


def _text_bytes(data: str | None) -> int:
    """Bytes of DATA that are on this machine; 0 of the hub's and for no DATA."""
    return sum(text_bytes(spec) or 0 for spec in parse_data(data)) if data else 0


def _check_begun(noted: Mapping[str, object], examples: "Examples") -> None:
    """Raise `UsageError` unless a training that is gone on with was begun on these examples, in steps of as many
    rows."""
    if noted["examples"] != examples.digest():
        raise UsageError("The data has changed since this run began. Start again with --overwrite.")
    if (begun := noted.get("processes", processes())) != processes():
        raise UsageError(
            f"This run was begun by {begun} processes, each with --batch-size rows of a step; now there are "
            f"{processes()}. Go on with {begun}, or start again with --overwrite."
        )
