"""What AutoRound loses on a model's experts, on the same calibration windows and the same test windows as moetool.

    python -m venv PEERS && PEERS/bin/pip install -r scripts/benchmarks/peers/requirements.txt
    python scripts/benchmarks/peers.py MODEL --python PEERS/bin/python --calibration TEXT --data TEST

Every row quantizes the experts alone, symmetric, in `--schemes` bits:group, by AutoRound in its own environment. What
it returns, dequantized, goes into an ordinary checkpoint in fp32, which is evaluated as `moetool eval --against` does.
Bytes are those of the packed codes, an fp16 scale per group, and all other tensors as they are; zero points, which
symmetric codes do not need, are not counted. Results in --work are not made again: delete it when a version or a text
has changed.
"""

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import Kept, made_by, publish
from safetensors.torch import load_file, save_file

from moetool.architectures import Role
from moetool.calibration.windows import load_tokenizer, sample_windows
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.reader import Checkpoint
from moetool.format.families import architecture_of
from moetool.measure.perplexity import EvaluationOptions, perplexity

# Else glibc keeps what tuning frees, and the process grows to several GB.
SPARING = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576", "MALLOC_ARENA_MAX": "2"}
WORKER = Path(__file__).parent / "peers" / "autoround.py"
ROLES: tuple[Role, ...] = ("gate", "up", "down")


def packed_bytes(reader: ExpertReader, bits: int, group: int) -> int:
    """The whole model with its experts in `bits` per number and an fp16 scale per `group` inputs."""
    before = after = 0
    for role in ROLES:
        rows, columns = reader.shape.matrix(role)
        before += rows * columns * reader.dtype.itemsize
        after += -(-rows * columns * bits // 8) + rows * -(-columns // min(group, columns)) * 2
    experts = reader.shape.experts * len(reader.moe_layers)
    return reader.checkpoint.weight_bytes - experts * (before - after)


def with_experts(source: Checkpoint, reader: ExpertReader, quantized: Path, target: Path) -> None:
    """Write the model in fp32 with these experts."""
    tensors = {name: source.read(name) for name in source.tensors}
    tensors = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    changed, left = load_file(quantized), dict.fromkeys(reader.names)
    for layer in reader.moe_layers:
        for expert in range(reader.shape.experts):
            for role in ROLES:
                name, matrix = (
                    reader.architecture.weight_name(layer, expert, role),
                    changed.pop(f"{layer}.{expert}.{role}"),
                )
                if name in tensors and tensors[name].shape == matrix.shape:
                    tensors[name] = matrix
                else:  # all experts of a layer in one tensor, gate above up
                    rows = len(matrix) if role == "up" else 0
                    tensors[name][expert, rows : rows + len(matrix)] = matrix
                left.pop(name, None)
    assert not changed
    assert not left
    shutil.copytree(source.path, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--python", required=True, help="of the environment with auto-round")
    parser.add_argument("--calibration", required=True)
    parser.add_argument(
        "--data", required=True, help="test text of the calibration's kind; texts of other kinds behind"
    )
    parser.add_argument("--schemes", default="2:128,3:128,4:128,2:32,3:32,4:32", help="bits:group, with commas")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--windows", type=int, default=200)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "moetool-peers")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    source = Checkpoint.open(options.model)
    reader = ExpertReader(source, architecture_of(source.config))
    tokenizer, kept = load_tokenizer(options.model), Kept(options.work / "peers.jsonl")
    evaluation = EvaluationOptions(
        data=options.data, sequence_length=options.sequence_length, windows=options.windows, against=options.model
    )

    def measure(bits: int, group: int, seed: int) -> dict[str, Any]:
        place = Path(tempfile.mkdtemp(dir=options.work))
        windows = sample_windows(
            options.calibration,
            tokenizer,
            samples=options.samples,
            sequence_length=options.sequence_length,
            seed=seed,
        )
        save_file({"windows": windows}, place / "windows.safetensors")
        began = time.monotonic()
        more = {"bits": bits, "group-size": group, "iterations": options.iterations, "seed": seed}
        words = [word for name, value in more.items() for word in (f"--{name}", str(value))]
        files = [str(place / name) for name in ("windows.safetensors", "experts.safetensors")]
        subprocess.run(
            [options.python, str(WORKER), options.model, *files, *words], check=True, env=os.environ | SPARING
        )
        seconds = time.monotonic() - began
        with_experts(source, reader, Path(files[1]), place / "model")
        found = perplexity(str(place / "model"), evaluation)
        shutil.rmtree(place)
        assert found.against is not None
        texts = [text.against.to_json() for text in found.texts if text.against is not None]
        return {"seconds": seconds, "texts": texts, **found.against.to_json()}

    names = [Path(text).name for text in options.data.split(",")]
    others = "".join(f" KL, mnat, {name} |" for name in names[1:])
    lines = [
        f"AutoRound, {options.iterations} iterations, {options.samples} × {options.sequence_length} tokens; "
        f"{options.windows} × {options.sequence_length} test tokens of each text.",
        "",
        f"| bits, group | seed | bytes | smaller by | excess, mnat | KL, mnat | top-1 |{others} seconds |",
        "|---|---|---|---|---|---|---|" + "---|" * len(names),
    ]
    for scheme in options.schemes.split(","):
        bits, group = map(int, scheme.split(":"))
        size = packed_bytes(reader, bits, group)
        for seed in map(int, options.seeds.split(",")):
            made = f"{options.model} {bits} {group} {seed} {options.iterations} {options.samples}"
            key = f"{made} {options.windows} {options.data}"
            row = kept.get(key, lambda bits=bits, group=group, seed=seed: measure(bits, group, seed))
            home, *abroad = row["texts"]
            elsewhere = "".join(f" {1000 * text['kl']:.2f} |" for text in abroad)
            lines.append(
                f"| {bits}, {group} | {seed} | {size:,} | {1 - size / source.weight_bytes:.2%} | "
                f"{1000 * home['excess']:.2f} ± {1000 * home['excess_error']:.2f} | {1000 * home['kl']:.2f} | "
                f"{home['agreement']:.2%} |{elsewhere} "
                f"{row['seconds']:.0f} |"
            )
            print(lines[-1], flush=True)
    command = (
        f"python scripts/benchmarks/peers.py {Path(options.model).name} --calibration {Path(options.calibration).name} "
        f"--data {','.join(names)} --schemes {options.schemes} --iterations {options.iterations} "
        f"--samples {options.samples} --sequence-length {options.sequence_length} --windows {options.windows} "
        f"--seeds {options.seeds}"
    )
    publish([made_by(command), "", *lines], options.output)


if __name__ == "__main__":
    main()
