"""The same models in moetool and in llama.cpp: perplexity on the same windows, tokens of the same text.

    python scripts/benchmarks/export_gguf.py MODEL [MODEL …] --data TEST.txt --work DIR [--random] [--output FILE.md]
        [--engines MODEL … --calibration TEXT]

Wants `llama-cpp-python`, which compiles llama.cpp from its source package, and moetool[gguf]. Every model is exported
by `export --format gguf` in several types, and run by llama.cpp on the windows of tokens that `eval` has made. With
--random models of the families that are not at hand are made of random numbers, with the first MODEL's tokenizer: their
perplexity means nothing, but whether two programs find the same one does. Models named by --engines are shown through
every door: transformers, moetool, compressed-tensors (which has to be installed), and llama.cpp, whose quantizer is
told what was measured on a text, or not. Tables grow by a row as each is done; a run that was stopped goes on where it
was.
"""

import argparse
import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import torch
from _common import Kept, made_by, publish
from llama_cpp import Llama
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

import moetool  # noqa: F401  (makes transformers load its checkpoints)
from moetool.calibration.windows import evaluation_windows, load_tokenizer
from moetool.checkpoint.reader import Checkpoint
from moetool.export.gguf.model import GgufSource
from moetool.format.gguf.words import IMATRIX, MODEL, TENSOR_TYPES
from moetool.job.execute import run_stage
from moetool.measure.perplexity import EvaluationOptions, perplexity
from moetool.stages import stages

TYPES = ("f32", "f16", "q8_0", "q4_0", "Q4_K_M")  # the last by llama.cpp's own quantizer, from f16
CHARACTERS = 20000  # of the text, that both tokenizers cut
GROUP = 32  # numbers that share a scale in compressed-tensors
FLOATS = ctypes.POINTER(ctypes.c_float)
SHAPE = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "max_position_embeddings": 512,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128, "num_experts": 8,
}  # fmt: skip
RANDOM: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        "intermediate_size": 512, "shared_expert_intermediate_size": 256, "num_key_value_heads": 4,
        "norm_topk_prob": False,
    },
    "qwen3_moe": {"intermediate_size": 512, "num_key_value_heads": 4, "head_dim": 64, "norm_topk_prob": True},
    "olmoe": {"intermediate_size": 128, "num_key_value_heads": 8, "norm_topk_prob": False},
}  # fmt: skip


def make_random(family: str, like: Path, target: Path) -> Path:
    """A model whose layers matter: matrices that keep the size of what they multiply, biases, uneven norms."""
    tokenizer = load_tokenizer(like)
    config = AutoConfig.for_model(family, **SHAPE, **RANDOM[family], vocab_size=len(tokenizer), dtype="bfloat16")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.1 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.copy_((parameter.ndim == 1) * parameter + scale * torch.randn(parameter.shape))
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def llama_cpp_logits(file: Path, windows: torch.Tensor) -> Iterator[torch.Tensor]:
    """What llama.cpp predicts in each of the windows `[windows, length]`: `[length - 1, vocabulary]` fp64."""
    length = windows.shape[1]
    model = Llama(
        str(file), n_ctx=length, n_batch=length, n_ubatch=length, logits_all=True, verbose=False, n_threads=1,
        n_threads_batch=1,
    )  # fmt: skip
    for window in windows:
        model.reset()
        model.eval(window.tolist())
        yield torch.from_numpy(np.array(model.scores[: length - 1])).double()
    model.close()


def transformers_logits(model: Path, windows: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same by transformers, in fp32 (of compressed-tensors: in the checkpoint's dtype)."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for window in windows:
        with torch.no_grad():
            yield loaded(window[None]).logits[0, :-1].double()


def loss(predicted: Iterator[torch.Tensor], windows: torch.Tensor) -> float:
    """Mean next-token loss over all windows, in nats."""
    losses = [F.cross_entropy(logits, window[1:]).item() for logits, window in zip(predicted, windows, strict=True)]
    return sum(losses) / len(losses)


def compared(predicted: Iterator[torch.Tensor], windows: torch.Tensor, reference: Path) -> dict[str, float]:
    """The same, and the mean Kullback-Leibler divergence from logits `[windows, length - 1, vocabulary]` in a file to
    these, in nats."""
    divergences: list[float] = []

    def watched() -> Iterator[torch.Tensor]:
        for logits, true in zip(predicted, np.load(reference, mmap_mode="r"), strict=True):
            expected = torch.from_numpy(true.astype(np.float64)).log_softmax(-1)
            divergences.append(
                F.kl_div(logits.log_softmax(-1), expected, reduction="batchmean", log_target=True).item()
            )
            yield logits

    return {"nll": loss(watched(), windows), "kl": sum(divergences) / len(divergences)}


def quantized(
    file: Path, number: str, *, imatrix: Path | None = None, types: Path | None = None, wide_ends: bool = False
) -> Path:
    """The file as `llama-quantize [--imatrix IMATRIX] [--tensor-type-file TYPES] FILE RESULT NUMBER` writes it; it
    takes the place of the first."""
    result = file.with_name("quantized.gguf")
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{number}"), 1
    if wide_ends:  # head and embeddings in Q8_0
        settings.output_tensor_type = settings.token_embedding_type = int(gguf.GGMLQuantizationType.Q8_0)
    means = {} if imatrix is None else importance(imatrix)
    if means:
        entries = [(name.encode(), mean.ctypes.data_as(FLOATS), mean.size) for name, mean in means.items()]
        settings.imatrix = (llama_cpp.llama_model_imatrix_data * (len(entries) + 1))(*entries)
    if types is not None:
        lines = [line.rpartition("=") for line in types.read_text().split()]
        known = {number.name.lower(): int(number) for number in gguf.GGMLQuantizationType}
        overrides = [(pattern.encode(), known[name.lower()]) for pattern, _, name in lines]
        settings.tt_overrides = (llama_cpp.llama_model_tensor_override * (len(overrides) + 1))(*overrides)
    if llama_cpp.llama_model_quantize(bytes(file), bytes(result), ctypes.byref(settings)):
        raise RuntimeError(f"llama.cpp cannot quantize {file}")
    return result.replace(file)


def importance(file: Path) -> dict[str, np.ndarray]:
    """Mean squared inputs by tensor, as `llama-quantize` reads them; ones for an expert that no token reached."""
    found = {tensor.name: tensor.data for tensor in gguf.GGUFReader(file).tensors}
    means = {}
    for name, sums in found.items():
        if name.endswith(".in_sum2"):
            own = name.removesuffix(".in_sum2")
            counts = found[f"{own}.counts"]
            means[own] = np.where(counts > 0, sums / np.maximum(counts, 1), 1).astype(np.float32)
    return means


def bits_per_weight(file: Path) -> float:
    """Bits of a number, over all tensors of a file."""
    tensors = gguf.GGUFReader(file).tensors
    return float(8 * sum(int(tensor.n_bytes) for tensor in tensors) / sum(int(tensor.n_elements) for tensor in tensors))


def same_tokens(file: Path, model: Path, text: str) -> bool:
    """Whether llama.cpp's tokenizer makes of a text what the checkpoint's does."""
    other = Llama(str(file), vocab_only=True, verbose=False)
    found = other.tokenize(text.encode(), add_bos=False, special=False)
    other.close()
    return found == load_tokenizer(model)(text, add_special_tokens=False, verbose=False)["input_ids"]


def windows_of(model: Path, options: argparse.Namespace) -> torch.Tensor:
    """What is evaluated: tokens `[windows, length]`."""
    return evaluation_windows(
        str(options.data), load_tokenizer(model), sequence_length=options.sequence_length, limit=options.windows,
        bos="never",
    )  # fmt: skip


def measured(model: Path, number: str, options: argparse.Namespace) -> dict[str, Any]:
    """One model in one type."""
    kind, target = stages()["gguf"], options.work / f"{model.name}-{number}"
    exported = number if number.islower() else "f16"
    run_stage(kind, model, target, kind.options_type(type=exported), overwrite=True)
    file = target / "model.gguf"
    if exported != number:
        file = quantized(file, number)
    windows = windows_of(model, options)
    text = options.data.read_text(encoding="utf-8")[:CHARACTERS]
    result = {
        "nll": loss(llama_cpp_logits(file, windows), windows), "bytes": file.stat().st_size,
        "same": same_tokens(file, model, text),
    }  # fmt: skip
    file.unlink()
    return result


def ours(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The same in moetool, in fp32."""
    asked = EvaluationOptions(
        data=str(options.data), sequence_length=options.sequence_length, windows=options.windows, bos="never",
        compute_dtype="float32",
    )  # fmt: skip
    return {"nll": perplexity(str(model), asked).nll}


def rows(models: Sequence[Path], options: argparse.Namespace, kept: Kept) -> Iterator[str]:
    for model in models:
        own = kept.get(f"{model.name}, moetool", lambda model=model: ours(model, options))["nll"]
        cells, same = [model.name, f"{math.exp(own):.4f}"], True
        for number in TYPES:
            found = kept.get(
                f"{model.name}, {number}", lambda model=model, number=number: measured(model, number, options)
            )
            off = math.expm1(found["nll"] - own)
            cells.append(f"{math.exp(found['nll']):.4f} ({off:+.3%}), {found['bytes'] / 1e6:.1f} MB")
            same = same and found["same"]
        yield f"| {' | '.join([*cells, 'yes' if same else 'NO'])} |"


def reference(model: Path, options: argparse.Namespace) -> Path:
    """A file with transformers' logits of a model, in fp16."""
    file = options.work / f"{model.name}, logits.npy"
    if not file.exists():
        found = [logits.half().numpy() for logits in transformers_logits(model, windows_of(model, options))]
        with file.with_suffix(".tmp").open("wb") as unfinished:
            np.save(unfinished, np.stack(found))
        file.with_suffix(".tmp").rename(file)
    return file


def in_transformers(model: Path, original: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A model there, beside its original, and bytes of its weights."""
    windows = windows_of(model, options)
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    return {**compared(transformers_logits(model, windows), windows, reference(original, options)), "bytes": size}


def packed(model: Path, bits: int, options: argparse.Namespace) -> dict[str, Any]:
    """The model by `export --format compressed-tensors`, in transformers."""
    kind, target = stages()["compressed-tensors"], options.work / f"{model.name}-{bits} bits"
    chosen = kind.options_type(bits=bits, group_size=GROUP, **calibrated(options))
    run_stage(kind, model, target, chosen, overwrite=True)
    return in_transformers(target, model, options)


def calibrated(options: argparse.Namespace) -> dict[str, Any]:
    """The text that codes, importance and types come from."""
    return {
        "calibration": str(options.calibration), "mix": 0, "samples": options.samples,
        "sequence_length": options.sequence_length,
    }  # fmt: skip


def advised(
    model: Path, number: str, options: argparse.Namespace, *, imatrix: bool = False, bits: float | None = None
) -> dict[str, Any]:
    """The model by `export --format gguf` and llama.cpp's quantizer, which is told as much as is asked for."""
    kind, target = stages()["gguf"], options.work / f"{model.name}-{number}"
    text = calibrated(options) if imatrix else {}
    run_stage(kind, model, target, kind.options_type(target_bpw=bits, **text), overwrite=True)
    file = target / MODEL
    if number != "F16":
        told = target / IMATRIX if imatrix else None
        file = quantized(file, number, imatrix=told, types=None if bits is None else target / TENSOR_TYPES)
    windows = windows_of(model, options)
    found = compared(llama_cpp_logits(file, windows), windows, reference(model, options))
    result = {**found, "bytes": file.stat().st_size, "bits": bits_per_weight(file)}
    file.unlink()
    return result


def engine_rows(model: Path, options: argparse.Namespace, kept: Kept) -> Iterator[str]:
    """One model through every door."""
    own: float | None = None

    def row(name: str, made: dict[str, Any]) -> str:
        nonlocal own
        own = made["nll"] if own is None else own
        bits = f"{made['bits']:.2f}" if "bits" in made else ""
        divergence = f"{made['kl']:.5f}" if "kl" in made else ""
        found = f"{math.exp(made['nll']):.3f} | {math.expm1(made['nll'] - own):+.2%} | {divergence}"
        return f"| {model.name} | {name} | {made['bytes'] / 1e6:.1f} MB | {bits} | {found} |"

    def get(name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return kept.get(f"{model.name}: {name}, {options.engine_windows} windows", make)

    few = argparse.Namespace(**{**vars(options), "windows": options.engine_windows})
    first = get("transformers", lambda: in_transformers(model, model, few))
    yield row("transformers, fp32", first)
    yield row("moetool, fp32", {"bytes": first["bytes"], **get("moetool", lambda: ours(model, few))})
    for bits in (8, 4) if has_experts(model) else ():
        yield row(f"compressed-tensors, {bits} bits", get(f"{bits} bits", lambda bits=bits: packed(model, bits, few)))
    for number in ("F16", "Q8_0"):
        yield row(f"llama.cpp, {number}", get(number, lambda number=number: advised(model, number, few)))
    for number in ("Q4_K_M", "Q2_K"):
        plain = get(number, lambda number=number: advised(model, number, few))
        told = get(f"{number} told", lambda number=number: advised(model, number, few, imatrix=True))
        target = math.floor(100 * plain["bits"]) / 100
        chosen = get(
            f"{number} chosen",
            lambda number=number, target=target: advised(model, number, few, imatrix=True, bits=target),
        )
        yield row(f"llama.cpp, {number}", plain)
        yield row(f"llama.cpp, {number} with our importance", told)
        yield row(f"llama.cpp, {number} with our importance and types (`--target-bpw {target}`)", chosen)


def has_experts(model: Path) -> bool:
    """Whether it is an MoE model."""
    return GgufSource.of(Checkpoint.open(model)).experts is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--engines", type=Path, nargs="*", default=[])
    parser.add_argument("--engine-windows", type=int, default=32)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept, models = Kept(options.work / "gguf.jsonl"), list(options.models)
    for family in RANDOM if options.random else ():
        path = options.work / f"{family}, random"
        models.append(path if (path / "config.json").exists() else make_random(family, models[0], path))
    command = "python scripts/benchmarks/export_gguf.py MODEL … --data TEST --work DIR" + " --random" * options.random
    command += " --engines MODEL … --calibration TEXT" * bool(options.engines)
    lines = [
        made_by(command)[:-1] + f" and llama-cpp-python {llama_cpp.__version__}. TEST is {options.data.name}.",
        "",
        f"Perplexity on the first {options.windows} windows of {options.sequence_length} tokens: moetool's in fp32, "
        "llama.cpp's of files in several types, how far it is from moetool's, and the size. "
        "Q4_K_M is by llama.cpp's own quantizer, without an importance matrix. Tokens: whether llama.cpp's "
        f"tokenizer makes the same of the text's first {CHARACTERS} characters.",
        "",
        f"| | moetool | {' | '.join(number.upper() for number in TYPES)} | same tokens |",
        "|---" * (len(TYPES) + 3) + "|",
    ]
    for row in rows(models, options, kept):
        lines.append(row)
        publish(lines, options.output)
    if not options.engines:
        return
    lines += [
        "",
        "## One model through every door",
        "",
        f"Perplexity on the first {options.engine_windows} windows of {options.sequence_length} tokens, how far it is "
        "from transformers', and the mean Kullback-Leibler divergence from transformers' predictions in nats, which "
        f"tells small errors from luck. What is measured on a text is measured on {options.samples} such windows of "
        f"TEXT, {options.calibration.name}. compressed-tensors has groups of {GROUP}; only experts are in few bits. "
        "llama.cpp's files are quantized by llama.cpp from ours in F16: without an importance matrix, with ours, and "
        "with ours and the types that `--target-bpw` chooses, in the bits per weight of llama.cpp's own mixture.",
        "",
        "| model | engine | size | bits per weight | perplexity | | divergence |",
        "|---|---|---|---|---|---|---|",
    ]
    for model in options.engines:
        for row in engine_rows(model, options, kept):
            lines.append(row)
            publish(lines, options.output)


if __name__ == "__main__":
    main()
