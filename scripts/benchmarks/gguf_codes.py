"""What llama.cpp's types lose when moetool chooses their codes, when llama.cpp does, and what moetool's format does.

    python scripts/benchmarks/gguf_codes.py MODEL --calibration VALID.txt --tests home=TEST.txt perldoc=PERL.txt
        --work DIR

Wants `llama-cpp-python`, which compiles llama.cpp from its source package, and moetool[gguf]. GGUF files are run by
llama.cpp, and compared with an F16 file that is run by llama.cpp. Its quantizer is given the mean squared inputs of the
same text (an importance matrix), or nothing; head and embeddings are Q8_0 in all GGUF files. What --own makes, in as
many bytes of tensors as llama.cpp's file, is run by transformers in fp32 and compared with the same F16 file. Files of
other tools (--files, such as those of `peers/autoround_gguf.py`) stand beside ours of as many bytes; their seconds say
nothing. A run that was stopped goes on where it was.
"""

import argparse
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import Kept, made_by, publish
from export_gguf import compared, llama_cpp_logits, quantized, transformers_logits
from other_text import Run, compressed, named, own_tests

from moetool.calibration.windows import evaluation_windows, load_tokenizer
from moetool.checkpoint.reader import Checkpoint
from moetool.format.gguf.words import IMATRIX, MODEL
from moetool.job.execute import run_stage
from moetool.stages import stages

# llama.cpp's mixture, and the types of ours, of all tensors and of the experts, that come next to its size from below.
OWN = "--method hybrid --include attention,embeddings"
PAIRS = {"Q2_K": ("q8_0", "q2_k"), "Q3_K_M": ("q6_k", "q3_k"), "Q4_K_M": ("q6_k", "q4_k"), "IQ4_XS": ("q6_k", "iq4_xs")}


class Doors:
    """One model through both quantizers, measured on windows of several texts.

    Args:
        model: its directory.
        windows: of each text, `[windows, length]`.
        options: of the command line.
    """

    def __init__(self, model: Path, windows: Mapping[str, torch.Tensor], options: argparse.Namespace) -> None:
        self.model, self.windows, self.options = model, windows, options
        self._plain = self._exported("f16", {"type": "f16"}, text=True)
        for name, own in windows.items():
            if not self._reference(name).exists():
                np.save(self._reference(name), np.stack([found.half() for found in llama_cpp_logits(self._plain, own)]))

    def _reference(self, name: str) -> Path:
        return self.options.work / f"{name}.npy"

    def _exported(self, name: str, types: Mapping[str, str | int], *, text: bool) -> Path:
        """Export the model, and return its GGUF file."""
        target, kind = self.options.work / name, stages()["gguf"]
        given = {"calibration": self.options.calibration, "samples": self.options.samples} if text else {}
        options = kind.options_type(**types, **given, **({"sequence_length": self.options.length} if text else {}))
        if not (target / MODEL).exists():
            run_stage(kind, self.model, target, options, overwrite=True)
        return target / MODEL

    def measured(self, file: Path, began: float) -> dict[str, Any]:
        """Bytes of a file, seconds since it was begun, and what it loses by text."""
        return self._measured(file.stat().st_size, began, partial(llama_cpp_logits, file))

    def _measured(
        self, size: int, began: float, predict: Callable[[torch.Tensor], Iterator[torch.Tensor]]
    ) -> dict[str, Any]:
        seconds = time.monotonic() - began
        found = {name: compared(predict(own), own, self._reference(name)) for name, own in self.windows.items()}
        of_each = {key: {name: one[key] for name, one in found.items()} for key in ("kl", "nll")}
        return {"bytes": size, "seconds": seconds, **of_each}

    def ours(self, number: str) -> dict[str, Any]:
        """The model in our codes of the types that stand beside one of llama.cpp's mixtures."""
        began, (rest, experts) = time.monotonic(), PAIRS[number]
        return self.measured(self._exported(number, {"type": rest, "experts_type": experts}, text=True), began)

    def sized(self, size: int) -> dict[str, Any]:
        """The model in our codes, in a file of at most `size` bytes with a type chosen for each tensor."""
        began = time.monotonic()
        return self.measured(self._exported(f"size-{size}", {"size": size}, text=True), began)

    def own(self, size: int) -> dict[str, Any]:
        """The model in moetool's format, in at most as many bytes of tensors as a GGUF file of `size` has."""
        began, options, target = time.monotonic(), self.options, self.options.work / "own"
        beside = self._plain.stat().st_size - Checkpoint.open(self.model).weight_bytes  # tokenizer and header
        text = f"--calibration {options.calibration} --samples {options.samples} --sequence-length {options.length}"
        made = compressed(
            str(self.model), target, Run("", f"{options.own} --size {size - beside} {text}", "", None, "", 0)
        )
        found = self._measured(made["bytes_after"] + beside, began, partial(transformers_logits, target))
        shutil.rmtree(target)
        return found

    def theirs(self, number: str, *, told: bool) -> dict[str, Any]:
        """The same by llama.cpp's quantizer, told what was measured on the text or not."""
        began, file = time.monotonic(), self.options.work / f"llama-{number}.gguf"
        file.write_bytes(self._plain.read_bytes())
        imatrix = self._plain.with_name(IMATRIX) if told else None
        return self.measured(quantized(file, number, imatrix=imatrix, wide_ends=True), began)


def parser_of(description: str | None, windows: int) -> argparse.ArgumentParser:
    """The options that `Doors` and `test_windows` look at."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--tests", nargs="+", required=True, metavar="NAME=DATA")
    parser.add_argument("--own", default=OWN, help="options of moetool compress; --size comes with each size")
    parser.add_argument("--windows", type=int, default=windows, help="of every test")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--output", type=Path)
    return parser


def test_windows(options: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Windows `[windows, length]` of every test, and of Python's standard library."""
    options.work.mkdir(parents=True, exist_ok=True)
    tests = named(options.tests) | {"code": own_tests(options.work)["code"]}
    tokenizer = load_tokenizer(options.model)
    return {
        name: evaluation_windows(data, tokenizer, sequence_length=options.length, limit=options.windows, bos="never")
        for name, data in tests.items()
    }


def beside(made: Mapping[str, dict[str, Any]], peer: str, told: dict[str, Any]) -> list[str]:
    """Rows of what was made, and behind each of ours its share of what a peer's, as `told`, loses."""
    lines = []
    for name, found in made.items():
        losses = " | ".join(f"{1000 * loss:.2f}" for loss in found["kl"].values())
        lines.append(f"| {name} | {found['bytes'] / 1e6:.2f} | {found['seconds']:.0f} | {losses} |")
        if name.startswith("moetool"):
            shares = " | ".join(f"{loss / told['kl'][test]:.3f}" for test, loss in found["kl"].items())
            lines.append(f"| of what {peer} loses | {found['bytes'] / told['bytes']:.3f} | | {shares} |")
    return lines


def main() -> None:
    parser = parser_of(__doc__, windows=32)
    parser.add_argument("--types", nargs="*", default=list(PAIRS), choices=list(PAIRS))
    parser.add_argument("--files", nargs="*", default=[], metavar="NAME=FILE", help="GGUF files that other tools made")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tests, kept = test_windows(options), Kept(options.work / "doors.jsonl")
    doors = Doors(options.model, tests, options)
    lines = [f"| | MB | s | {' | '.join(tests)} |", "|---" * (len(tests) + 3) + "|"]
    for number in options.types:
        rest, experts = PAIRS[number]
        told = kept.get(f"{number} told", partial(doors.theirs, number, told=True))
        made = {
            f"llama.cpp, {number}": kept.get(number, partial(doors.theirs, number, told=False)),
            f"llama.cpp, {number}, importance": told,
            f"moetool, `--type {rest} --experts-type {experts}`": kept.get(
                f"ours {number}", partial(doors.ours, number)
            ),
            "moetool, `--size`": kept.get(f"sized {number}", partial(doors.sized, told["bytes"])),
            f"moetool, `{options.own}`": kept.get(f"{options.own} {number}", partial(doors.own, told["bytes"])),
        }
        lines += (rows := beside(made, "llama.cpp with importance", told))
        print(*rows, sep="\n", flush=True)
    for name, file in named(options.files).items():
        theirs = kept.get(name, partial(doors.measured, Path(file), time.monotonic()))
        ours = kept.get(f"sized {name}", partial(doors.sized, theirs["bytes"]))
        lines += (rows := beside({name: theirs, "moetool, `--size`": ours}, name, theirs))
        print(*rows, sep="\n", flush=True)
    command = (
        "python scripts/benchmarks/gguf_codes.py MODEL --calibration VALID --tests home=TEST perldoc=PERL --work DIR"
    )
    publish([made_by(command), "", *lines], options.output)


if __name__ == "__main__":
    main()
