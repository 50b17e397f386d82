"""Loss of exports to MLX beside mlx-lm's own conversion, all run by mlx-lm.

    python scripts/benchmarks/in_mlx.py MODEL CALIBRATION TEXT[,TEXT…] --work DIR [--windows 16] [--bits 4,3,2]

MODEL is an MoE model of a family that `export --format mlx` takes. Each number of bits is made by `mlx_lm.convert -q`,
by `export` without a text, and by `export` with CALIBRATION, half of it the bundled text: with 8, 6 and 4 bits for what
is no expert, and with `--size` in the bytes of the first of these and of `mlx_lm.convert -q`, where these are reached.
KL divergence is to the original in mlx-lm, in fp32 on a CPU. Needs `pip install mlx-lm 'mlx[cpu]'`.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _common import made_by, publish
from transformers import AutoTokenizer

from moetool.checkpoint.reader import Checkpoint
from moetool.format.mlx import told_outright

GROUP, LENGTH = 64, 256


def done(*words: str, refused: int = 0) -> bool:
    """Run a command; end with its code if it fails. Returns whether it has not ended with the code `refused`."""
    code = subprocess.run([sys.executable, "-m", *words], stdout=subprocess.DEVNULL).returncode
    if code not in (0, refused):
        sys.exit(code)
    return not code


def readable(model: str, work: Path) -> Path:
    """A copy of the original whose config says outright what mlx-lm looks for."""
    source, copy = Checkpoint.open(model), work / "original"
    shutil.copytree(source.path, copy, dirs_exist_ok=True)
    config = {**source.config, **told_outright(source.settings)}
    (copy / "config.json").write_text(json.dumps(config, indent=2))
    return copy


def made(options: argparse.Namespace, original: Path) -> Iterator[tuple[str, int, Path]]:
    """How each model was made, its bits and where it is; those that are there already are not made again."""
    text = ["--calibration", options.calibration, "--samples", "64", "--sequence-length", str(LENGTH)]
    for bits in map(int, options.bits.split(",")):
        theirs = options.work / f"convert-{bits}"
        if not (theirs / "config.json").exists():
            shutil.rmtree(theirs, ignore_errors=True)
            words = ("--q-bits", str(bits), "--q-group-size", str(GROUP))
            done("mlx_lm", "convert", "--hf-path", str(original), "--mlx-path", str(theirs), "-q", *words)
        yield "`mlx_lm.convert -q`", bits, theirs
        ways = {
            "nearest": ("`export --format mlx`", []),
            "chosen": ("the same with `--calibration`", text),
            "chosen-six": ("and `--other-bits 6`", [*text, "--other-bits", "6"]),
            "chosen-four": ("and `--other-bits 4`", [*text, "--other-bits", "4"]),
        }
        for name, (label, more) in ways.items():
            ours, words = options.work / f"{name}-{bits}", ("--format", "mlx", "--bits", str(bits), *more)
            done("moetool", "export", options.model, str(ours), *words, "--group-size", str(GROUP), "--resume")
            yield label, bits, ours
        for other in ("chosen", "convert"):
            size, ours = nbytes(options.work / f"{other}-{bits}"), options.work / f"size-{other}-{bits}"
            words = ("--format", "mlx", "--size", str(size), *text, "--group-size", str(GROUP), "--resume")
            if done("moetool", "export", options.model, str(ours), *words, refused=2):
                yield f"`--size` {size / 1e6:.1f}MB", bits, ours


def nbytes(model: Path) -> int:
    """Bytes of a model's weight files."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


def log_probabilities(model: Path, windows: np.ndarray) -> Iterator[np.ndarray]:
    """Of every window `[tokens]`: `[tokens, vocabulary]`."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    with mx.stream(mx.cpu):
        loaded, _ = load_model(model)
        loaded.set_dtype(mx.float32)
        for window in windows:
            logits = loaded(mx.array(window[None])).astype(mx.float32)
            yield np.array((logits - mx.logsumexp(logits, axis=-1, keepdims=True))[0])


def main() -> None:
    """Make all models, measure them, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("calibration")
    parser.add_argument("texts")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--bits", default="4,3,2")
    parser.add_argument("--output", type=Path, help="a Markdown file")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    original, tokenizer = readable(options.model, options.work), AutoTokenizer.from_pretrained(options.model)
    models = list(made(options, original))
    lost: dict[Path, list[float]] = {path: [] for _, _, path in models}
    for text in options.texts.split(","):
        tokens = tokenizer(Path(text).read_text()).input_ids[: options.windows * LENGTH]
        windows = np.array(tokens).reshape(options.windows, LENGTH)
        right = list(log_probabilities(original, windows))
        for path, found in lost.items():
            pairs: Any = zip(right, log_probabilities(path, windows), strict=True)
            found.append(1000 * float(np.mean([(np.exp(p) * (p - q)).sum(-1).mean() for p, q in pairs])))
    names = [Path(text).stem for text in options.texts.split(",")]
    lines = [f"| bits | | MB | {' | '.join(names)} |", "|---|---|---|" + "---|" * len(names)]
    for name, bits, path in models:
        lines.append(
            f"| {bits} | {name} | {nbytes(path) / 1e6:.1f} | {' | '.join(f'{number:.3g}' for number in lost[path])} |"
        )
    publish([made_by(f"python scripts/benchmarks/in_mlx.py MODEL VALID {','.join(names)}"), "", *lines], options.output)


if __name__ == "__main__":
    main()
