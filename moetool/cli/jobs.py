"""Rendering of the plans and results of jobs as fields on stdout."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from moetool.checkpoint.sizes import format_bytes, format_change
from moetool.cli.display import print_fields
from moetool.compress.results import MixedResult, RankedResult
from moetool.convert.results import Activations, ConversionResult, Proof
from moetool.job.forecast import format_seconds
from moetool.job.result import Json, LoadedLayer, Result, Sizes
from moetool.measure.results import NAT_UNIT, shown_kl
from moetool.reduce.results import DroppedResult, ReducedResult
from moetool.repair.results import RepairedResult, RepairResult
from moetool.tune.results import TuningResult
from moetool.upcycle.results import AddedResult

if TYPE_CHECKING:
    from moetool.job.estimate import Estimate

_LABELS = {  # of a plan's fields, where their names alone do not say it
    "scratch_bytes": "temporary files",
    "disk_bytes": "disk in all",
    "moe_layers": "MoE layers",
    "experts_at_once": "experts in memory at once",
    "forms_per_matrix": "forms tried per matrix",
    "routing": "weight of routing loss",
    "trains": "--train",
    "headers": "shapes from",
}
_FOR_ENGINES = ("gguf", "mlx", "compressed-tensors")  # formats that code a compressed model's experts anew
_WORTH = 0.75  # of the time: a faster way that is said to be there


def print_plan(plan: Mapping[str, Json], told: "Estimate", in_bf16: "tuple[Estimate, str] | None") -> None:
    """What a job will cost; beside that its time `in_bf16`, with the option for it, where that is worth it."""

    def show(name: str, value: Json) -> str:
        if name == "calibration" and isinstance(texts, str):
            return texts
        if isinstance(value, list):
            return _listed(value)
        if not isinstance(value, int):
            return str(value)
        original = plan.get("original_bytes")
        change = ""
        if name == "output_bytes" and isinstance(original, int):
            than = " than what the file is read as" if "gguf_bytes" in plan else ""
            change = f" ({format_change(1 - value / original)}{than})"
        if name == "gguf_bytes":
            change = ": input and original are what the file is read as"
        return format_bytes(value) + change if name.endswith("bytes") else f"{value:,}"

    texts = plan.get("texts")
    # In the lines of `calibration`, of added parameters, and of bits per expert weight.
    said = {"texts", "added_as_published", "bits_per_number"}
    if plan.get("original_bytes") == plan["input_bytes"]:
        said.add("original_bytes")
    fields = [
        (_LABELS.get(name, name.removesuffix("_bytes").replace("_", " ")), show(name, value))
        for name, value in plan.items()
        if name not in said
    ]
    if told.seconds is None:
        fields.append(("time", f"unknown: {told.unknown}"))
    else:
        parts = [f"{phase.name} {format_seconds(phase.seconds)}" for phase in told.phases if phase.seconds >= 1]
        among = f" ({', '.join(parts)})" if len(parts) > 1 else ""
        fields.append(("time", f"about {format_seconds(told.seconds)}{among}"))
        if in_bf16 is not None and (quicker := in_bf16[0].seconds) is not None and quicker < _WORTH * told.seconds:
            fields.append(("in bfloat16", f"about {format_seconds(quicker)} with {in_bf16[1]}"))
    print_fields(fields)
    print("Nothing was written (--dry-run).")


def print_result(result: Result) -> None:
    """Print the result of a finished job: output path, size, details of its stage, wall time and peak memory."""
    fields = [("output", result.output)]
    if (sizes := result.sizes) is not None:
        fields.append(("size", _size(sizes)))
    details = result.details
    made = details.before_repair.details if isinstance(details, RepairedResult) else details
    if isinstance(details, ConversionResult):
        fields += _conversion(details)
    if isinstance(details, RepairResult):
        fields += _repaired(details)
    if isinstance(details, TuningResult):
        fields += _tuned(details)
    if isinstance(made, AddedResult | DroppedResult):
        fields += _other_experts(made)
    if isinstance(made, RankedResult | ReducedResult | MixedResult | AddedResult | ConversionResult):
        fields += [("note", note) for note in made.notes]
    if result.stage in _FOR_ENGINES and sizes is not None and sizes.bytes_input:
        twice = "The input was compressed already, so its weights are rounded a second time."
        fields.append(("note", f"{twice} Export the original instead, which loses less at the same size."))
    if result.status == "finished":
        print_fields([*fields, ("status", "finished already; nothing was done")])
        return
    fields.append(("verified", "headers, shapes and digests; all numbers are finite"))
    if result.loaded is not None:
        fields.append(("loaded", _loaded(result.loaded, result.stage)))
    fields.append(("time", f"{result.seconds:.1f} s"))
    fields.append(("peak memory", format_bytes(result.peak_memory_bytes)))
    print_fields(fields)


def _listed(values: Sequence[object]) -> str:
    """Values with commas; equal ones that follow each other are said once, with their number."""
    groups = [(value, len(list(group))) for value, group in groupby(values)]
    names = [("not recorded" if value is None else str(value), count) for value, count in groups]
    return ", ".join(name if count == 1 else f"{count} × {name}" for name, count in names)


def _other_experts(told: AddedResult | DroppedResult) -> list[tuple[str, str]]:
    """Which experts a model has after one was added, or some were dropped."""
    if isinstance(told, AddedResult):
        said = f"{told.experts}, {told.top_k} per token; number {told.added} is new"
    else:
        said = f"{told.experts_left} left, {told.top_k} per token; dropped: {_listed(told.dropped)}"
    fields = [("experts", said)]
    return [*fields, ("made of", _listed(told.sources))] if any(told.sources) else fields


def _conversion(told: ConversionResult) -> list[tuple[str, str]]:
    fields = [] if told.target is None else [("family", told.target)]
    fields.append(("parameters", f"{told.parameters.total:,}, of which {told.parameters.active:,} per token"))
    if told.proof is not None:
        fields += _proof(told.proof)
    if told.activations is not None:
        fields += _activations(told.activations)
    return fields


def _proof(proof: Proof) -> list[tuple[str, str]]:
    which = "with all experts " if proof.with_all_experts else ""
    verdict = "" if proof.preserves else " (the method changes the model)"
    error = f"{proof.relative_logit_error:.1e} of their size on {proof.tokens} tokens of text"
    logits = f"{which}differ from the dense model's by {error}{verdict}"
    fields = [("logits", logits)]
    if (losses := proof.losses) is not None:
        kept = f"{losses.loss_mixture:.4f} nats per token"
        if proof.loss_kept is not None:
            kept = f"{proof.loss_kept:.4f} nats per token with the experts kept"
        fields.append(("loss", f"{losses.loss_dense:.4f} (dense) → {kept}"))
    if (routing := proof.routing) is not None:
        least, largest = routing.least_expert_share, routing.largest_expert_share
        entropy = f"router entropy {routing.router_entropy:.2f} nats"
        fields.append(("routing", f"each expert gets {least:.1%} to {largest:.1%} of the tokens; {entropy}"))
    return fields


def _activations(found: Activations) -> list[tuple[str, str]]:
    near, centred = found.soft_sparsity, found.soft_sparsity_centred
    fields = [("activations", f"{near:.1%} near zero, {centred:.1%} near their mean")]
    if found.captured is not None:
        text = f"those chosen hold {found.captured:.1%} of the activations' energy"
        if found.captured_by_oracle is not None:
            text += f" (the best possible choice: {found.captured_by_oracle:.1%}; "
            text += f"{found.selector_accuracy:.1%} of its experts were chosen)"
        fields.append(("experts", text))
    return fields


def _size(sizes: Sizes) -> str:
    """Both sizes, and the original's, too, where the input had been compressed already and is not what counts."""
    before, after = format_bytes(sizes.bytes_before), format_bytes(sizes.bytes_after)
    change = format_change(sizes.achieved_ratio) if sizes.achieved_ratio else ""
    if sizes.gguf_bytes is not None:
        than = f" ({change} than {before})" if change else ""
        return f"{format_bytes(sizes.gguf_bytes)} in GGUF, read as {before} → {after}{than}"
    if sizes.bytes_input is not None:
        than = f"{change} than the {before} of" if sizes.bytes_after != sizes.bytes_before else "as large as"
        return f"{format_bytes(sizes.bytes_input)} → {after} ({than} the original model)"
    return f"{before} → {after}" + (f" ({change})" if change else "")


def _loaded(loaded: LoadedLayer, stage: str) -> str:
    if (error := loaded.relative_error) is None:
        return "by transformers: every tensor has the name and shape that it expects"
    if stage == "gguf":
        rounded = f"rounding to its types moved matrices by {error:.1%} at most (‖Δ‖ / ‖matrix‖)"
        return f"layer {loaded.layer} of the file reads back as it was written; {rounded}"
    within = f"within {error:.1e} of their size" if error else "exactly"
    return f"by transformers: outputs of layer {loaded.layer} are those of the stored weights, {within}"


def _tuned(told: TuningResult) -> list[tuple[str, str]]:
    """What was trained for how long, and the losses at both ends of it: of the training's own steps, and held out."""
    training, unit = told.training, "nats per token"
    steps = f"{training.steps} step{'s' * (training.steps != 1)}"
    fields = [("trained", f"{told.trained_parameters:,} parameters in {steps}")]
    if losses := [point["loss"] for point in training.curve if "loss" in point]:
        fields.append(("training loss", f"{losses[0]:.4f} → {losses[-1]:.4f} (first and last of the log)"))
    if (after := training.eval_loss) is not None:
        before = "" if training.eval_loss_before is None else f"{training.eval_loss_before:.4f} → "
        fields.append(("held-out loss", f"{before}{after:.4f} {unit} (perplexity {training.eval_perplexity:.2f})"))
    return fields


def _repaired(told: RepairResult) -> list[tuple[str, str]]:
    if told.kept_step == 0:
        said = "No step made a held-out text better and none worse: the weights are those of the input."
        return [("note", said)]
    changes = ", ".join(
        f"{shown_kl(before)} → {shown_kl(told.kl_after[name])} on {name}" for name, before in told.kl_before.items()
    )
    return [("held out", f"KL divergence from the original {changes}, in {NAT_UNIT} (step {told.kept_step})")]
