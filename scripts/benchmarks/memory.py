"""Peak memory of `moetool compress` against the depth of the model.

    python scripts/benchmarks/memory.py

Writes synthetic Mixtrals of 4, 8 and 16 equally large layers, compresses each through the command line and prints the
peak of anonymous memory (the page cache not counted) against the bound: four decoder layers in fp32 plus the hidden
states of the calibration set.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from _common import made_by, publish, write_random_text, write_tokenizer
from safetensors.torch import save_file

VOCABULARY = 512


def write_model(directory: Path, layers: int, hidden: int, intermediate: int, experts: int) -> None:
    """A random Mixtral in bf16, one shard per layer, experts around a common mean."""
    directory.mkdir(parents=True)
    heads = hidden // 64
    config = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": VOCABULARY,
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads // 4, "num_local_experts": experts,
        "num_experts_per_tok": 2, "max_position_embeddings": 512, "dtype": "bfloat16", "tie_word_embeddings": True,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    index = {}

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.02).bfloat16()

    def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, directory / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, name))

    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors = {
            prefix + f"{norm}_layernorm.weight": torch.ones(hidden).bfloat16() for norm in ("input", "post_attention")
        }
        for name, rows in (("q", hidden), ("k", hidden // 4), ("v", hidden // 4), ("o", hidden)):
            tensors[prefix + f"self_attn.{name}_proj.weight"] = weight(rows, hidden)
        tensors[prefix + "block_sparse_moe.gate.weight"] = weight(experts, hidden)
        for name, shape in (
            ("w1", (intermediate, hidden)),
            ("w2", (hidden, intermediate)),
            ("w3", (intermediate, hidden)),
        ):
            mean = weight(*shape)
            for expert in range(experts):
                tensors[prefix + f"block_sparse_moe.experts.{expert}.{name}.weight"] = mean + weight(*shape) / 4
        save(f"model-{layer + 1:05d}-of-{layers + 1:05d}.safetensors", tensors)
    rest = {"model.embed_tokens.weight": weight(VOCABULARY, hidden), "model.norm.weight": torch.ones(hidden).bfloat16()}
    save(f"model-{layers + 1:05d}-of-{layers + 1:05d}.safetensors", rest)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    write_tokenizer(directory, VOCABULARY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=6144)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--method", choices=("d2moe", "hybrid"), default="d2moe")
    parser.add_argument("--memory", help="what the job may use, as for compress; any if not given")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "moetool-memory")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    attention = 2 * options.hidden**2 + 2 * options.hidden * options.hidden // 4
    layer = 4 * (3 * options.experts * options.hidden * options.intermediate + attention)
    calibration = 4 * options.samples * options.sequence_length * options.hidden
    bound = 4 * layer + calibration
    lines = [
        f"One layer: {layer / 1e9:.3f} GB in fp32. Calibration set: {calibration / 1e6:.0f} MB. "
        f"Bound: 4 layers + calibration = {bound / 1e9:.2f} GB.",
        "",
        "| layers | model on disk | peak anonymous memory | of the bound | seconds |",
        "|---|---|---|---|---|",
    ]
    for count in options.layers:
        shutil.rmtree(options.work, ignore_errors=True)
        write_model(options.work / "model", count, options.hidden, options.intermediate, options.experts)
        text = options.work / "text.txt"
        write_random_text(text, VOCABULARY, 4 * options.samples * options.sequence_length)
        finished = subprocess.run(
            [sys.executable, "-c", "from moetool.cli import main; main()", "compress", options.work / "model",
             options.work / "out", "--calibration", text, "--mix", "0", "--samples", str(options.samples),
             "--sequence-length", str(options.sequence_length), "--json", "--method", options.method, "--ratio",
             "0.5" if options.method == "d2moe" else "0.75", *(["--memory", options.memory] if options.memory else [])],
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        result = json.loads(finished.stdout)
        peak = result["peak_memory_bytes"]
        lines.append(
            f"| {count} | {result['bytes_before'] / 1e9:.2f} GB | {peak / 1e9:.3f} GB | {peak / bound:.2f} "
            f"| {result['seconds']:.0f} |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    shutil.rmtree(options.work, ignore_errors=True)
    publish([f"{made_by('python scripts/benchmarks/memory.py')} `{options.method}`.", "", *lines], options.output)


if __name__ == "__main__":
    main()
