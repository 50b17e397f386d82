"""The same models in moetool and in llama.cpp: perplexity on the same windows, tokens of the same text.

    python scripts/benchmarks/export_gguf.py MODEL [MODEL …] --data TEST.txt --work DIR [--random] [--output FILE.md]

Wants `llama-cpp-python`, which compiles llama.cpp from its source package, and moetool[gguf]. Every model is exported
by `export --format gguf` in several types, and run by llama.cpp on the windows of tokens that `eval` has made. With
--random models of the families that are not at hand are made of random numbers, with the first MODEL's tokenizer: their
perplexity means nothing, but whether two programs find the same one does. The table grows by a row as each is done; a
run that was stopped goes on where it was.
"""

import argparse
import ctypes
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import torch
from _common import Kept, made_by, publish
from llama_cpp import Llama
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

import moetool  # noqa: F401  (makes transformers load its checkpoints)
from moetool.calibration.windows import evaluation_windows, load_tokenizer
from moetool.job.execute import run_stage
from moetool.measure.perplexity import EvaluationOptions, perplexity
from moetool.stages import stages

TYPES = ("f32", "f16", "q8_0", "q4_0", "Q4_K_M")  # the last by llama.cpp's own quantizer, from f16
CHARACTERS = 20000  # of the text, that both tokenizers cut
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


def llama_cpp_loss(file: Path, windows: torch.Tensor) -> float:
    """Mean next-token loss over all windows `[windows, length]`, in nats."""
    length, losses = windows.shape[1], []
    model = Llama(
        str(file), n_ctx=length, n_batch=length, n_ubatch=length, logits_all=True, verbose=False, n_threads=1,
        n_threads_batch=1,
    )  # fmt: skip
    for window in windows:
        model.reset()
        model.eval(window.tolist())
        logits = torch.from_numpy(np.array(model.scores[: length - 1])).double()
        losses.append(F.cross_entropy(logits, window[1:]).item())
    model.close()
    return sum(losses) / len(losses)


def requantized(file: Path) -> Path:
    """The file as `llama-quantize FILE RESULT Q4_K_M` writes it; it takes the place of the first."""
    result = file.with_name("quantized.gguf")
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M, 1
    if llama_cpp.llama_model_quantize(bytes(file), bytes(result), ctypes.byref(settings)):
        raise RuntimeError(f"llama.cpp cannot quantize {file}")
    return result.replace(file)


def same_tokens(file: Path, model: Path, text: str) -> bool:
    """Whether llama.cpp's tokenizer makes of a text what the checkpoint's does."""
    other = Llama(str(file), vocab_only=True, verbose=False)
    found = other.tokenize(text.encode(), add_bos=False, special=False)
    other.close()
    return found == load_tokenizer(model)(text, add_special_tokens=False, verbose=False)["input_ids"]


def measured(model: Path, number: str, options: argparse.Namespace) -> dict[str, Any]:
    """One model in one type."""
    kind, target = stages()["gguf"], options.work / f"{model.name}-{number}"
    exported = number if number.islower() else "f16"
    run_stage(kind, model, target, kind.options_type(type=exported), overwrite=True)
    file = target / "model.gguf"
    if exported != number:
        file = requantized(file)
    windows = evaluation_windows(
        str(options.data), load_tokenizer(model), sequence_length=options.sequence_length, limit=options.windows,
        bos="never",
    )  # fmt: skip
    text = options.data.read_text(encoding="utf-8")[:CHARACTERS]
    result = {
        "nll": llama_cpp_loss(file, windows), "bytes": file.stat().st_size, "same": same_tokens(file, model, text)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept, models = Kept(options.work / "gguf.jsonl"), list(options.models)
    for family in RANDOM if options.random else ():
        path = options.work / f"{family}, random"
        models.append(path if (path / "config.json").exists() else make_random(family, models[0], path))
    command = "python scripts/benchmarks/export_gguf.py MODEL … --data TEST --work DIR" + " --random" * options.random
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


if __name__ == "__main__":
    main()
