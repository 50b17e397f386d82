"""What other tools lose on a model's experts, on the same calibration windows and the same test windows as moetool.

    python -m venv PEERS && PEERS/bin/pip install -r scripts/benchmarks/peers/requirements.txt
    python scripts/benchmarks/peers.py MODEL… --python PEERS/bin/python --calibration TEXT --data TEST
        [--peers autoround,autoround-best,hqq,nf4] [--own "--method hybrid" …]
    python -m venv GPTQ && GPTQ/bin/pip install -r scripts/benchmarks/peers/requirements-gptq.txt
    python scripts/benchmarks/peers.py MODEL… --python GPTQ/bin/python --peers gptq,gptaq,foem …

Every peer quantizes the experts alone, in `--schemes` bits:group, in its own environment: AutoRound at its defaults and
at its best for few bits, GPTQ, GPTAQ and FOEM (all symmetric), HQQ, and NF4 where there are 4 bits. What it returns,
dequantized, goes into an ordinary checkpoint in fp32, which is evaluated as `moetool eval --against` does. Bytes are
those of the packed codes, of what each group needs beside them (a scale in fp16; HQQ also a zero point; NF4 a scale in
fp32), and all other tensors as they are. With --own, what `moetool compress` makes by these options stands below the
peers of every scheme, in at most as many bytes as the smallest of them, on the same windows. Results in --work are not
made again: delete it when a version or a text has changed.
"""

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from _common import Kept, made_by, publish
from other_text import Run, compressed
from safetensors.torch import load_file, save_file

from moetool.architectures import Role
from moetool.calibration.windows import load_tokenizer, sample_windows
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.reader import Checkpoint
from moetool.format.families import architecture_of
from moetool.measure.perplexity import EvaluationOptions, perplexity

# Else glibc keeps what tuning frees, and the process grows to several GB.
SPARING = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576", "MALLOC_ARENA_MAX": "2"}
WORKERS = Path(__file__).resolve().parent / "peers"
ROLES: tuple[Role, ...] = ("gate", "up", "down")


@dataclass(frozen=True)
class Peer:
    """A tool.

    Attributes:
        name: in tables.
        worker: the script of peers/ that runs it; one that takes a text is given windows of it, any other matrices.
        words: for the worker.
        group_bytes: what a group of its codes needs beside them.
        bits: that it knows.
    """

    name: str
    worker: str
    words: tuple[str, ...] = ()
    group_bytes: int = 2
    bits: tuple[int, ...] = (2, 3, 4, 8)

    @property
    def takes_text(self) -> bool:
        return self.worker != "by_matrix.py"


PEERS: Mapping[str, Peer] = {
    "autoround": Peer("AutoRound", "autoround.py"),
    "autoround-best": Peer("AutoRound at its best", "autoround.py", ("--best",)),
    "gptq": Peer("GPTQ", "gptq.py"),
    "gptaq": Peer("GPTAQ", "gptq.py", ("--peer", "gptaq")),
    "foem": Peer("FOEM", "gptq.py", ("--peer", "foem")),
    "hqq": Peer("HQQ", "by_matrix.py", ("--peer", "hqq"), group_bytes=4),
    "nf4": Peer("NF4", "by_matrix.py", ("--peer", "nf4"), group_bytes=4, bits=(4,)),
}


class Model:
    """A model whose experts are quantized, and what it takes to measure that."""

    def __init__(self, path: str, options: argparse.Namespace) -> None:
        self.path, self.options, self.source = path, options, Checkpoint.open(path)
        self.reader = ExpertReader(self.source, architecture_of(self.source.config))
        self.evaluation = EvaluationOptions(
            data=options.data, sequence_length=options.sequence_length, windows=options.windows, against=path
        )

    def packed_bytes(self, bits: int, group: int, beside: int) -> int:
        """The whole model with its experts in `bits` per number, and `beside` bytes per `group` inputs."""
        before = after = 0
        for role in ROLES:
            rows, columns = self.reader.shape.matrix(role)
            before += rows * columns * self.reader.dtype.itemsize
            after += -(-rows * columns * bits // 8) + rows * -(-columns // min(group, columns)) * beside
        experts = self.reader.shape.experts * len(self.reader.moe_layers)
        return self.source.weight_bytes - experts * (before - after)

    def by_peer(self, peer: Peer, bits: int, group: int, seed: int) -> dict[str, Any]:
        """What a peer loses, and its seconds."""
        options, place = self.options, Path(tempfile.mkdtemp(dir=self.options.work)).resolve()
        given, found = place / "given.safetensors", place / "experts.safetensors"
        words = ["--bits", str(bits), "--group-size", str(group), *peer.words]
        if peer.takes_text:
            windows = sample_windows(
                options.calibration, load_tokenizer(self.path), samples=options.samples,
                sequence_length=options.sequence_length, seed=seed,
            )  # fmt: skip
            save_file({"windows": windows}, given)
        else:
            save_file(matrices(self.reader), given)
        if peer.worker == "autoround.py":
            words += ["--iterations", str(options.iterations), "--seed", str(seed)]
        named = [str(Path(self.path).absolute())] if peer.takes_text else []
        began = time.monotonic()
        python = str(Path(options.python).absolute())
        command = [python, str(WORKERS / peer.worker), *named, str(given), str(found), *words]
        subprocess.run(command, check=True, env=os.environ | SPARING, cwd=place)  # some leave files where they run
        seconds = time.monotonic() - began
        if found.is_dir():
            made = Checkpoint.open(found)
            changed = matrices(ExpertReader(made, architecture_of(made.config)))
        else:
            changed = load_file(found)
        self._write_with(changed, place / "model")
        return self._evaluated(place / "model", seconds, place)

    def by_us(self, flags: str, size: int) -> dict[str, Any]:
        """What `moetool compress` loses in at most `size` bytes, on the same windows."""
        options, place = self.options, Path(tempfile.mkdtemp(dir=self.options.work))
        shape = f"{options.samples}x{options.sequence_length}"
        made = compressed(
            self.path, place / "model", Run("", f"{flags} --size {size}", "", options.calibration, shape, 0)
        )
        return {"bytes": made["bytes_after"], **self._evaluated(place / "model", made["seconds"], place)}

    def _evaluated(self, model: Path, seconds: float, place: Path) -> dict[str, Any]:
        texts = perplexity(str(model), self.evaluation).texts
        shutil.rmtree(place)
        against = [text.against.to_json() for text in texts if text.against is not None]
        return {"seconds": seconds, "texts": against, **against[0]}

    def _write_with(self, changed: dict[str, Any], target: Path) -> None:
        """Write the model in fp32 with these experts."""
        source, reader = self.source, self.reader
        tensors = {name: source.read(name) for name in source.tensors}
        tensors = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
        left = dict.fromkeys(reader.names)
        for layer in reader.moe_layers:
            for expert in range(reader.shape.experts):
                for role in ROLES:
                    name = reader.architecture.weight_name(layer, expert, role)
                    matrix = changed.pop(f"{layer}.{expert}.{role}")
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


def matrices(reader: ExpertReader) -> dict[str, Any]:
    """The matrices of all experts, by `{layer}.{expert}.{role}`."""
    return {
        f"{layer}.{expert}.{role}": reader.dense(layer, expert, role).contiguous()
        for layer in reader.moe_layers
        for expert in range(reader.shape.experts)
        for role in ROLES
    }


def row(name: str, model: Model, size: int, found: Mapping[str, Any]) -> str:
    """A line of the table."""
    home, *abroad = found["texts"]
    cells = [
        name, f"{size:,}", f"{1 - size / model.source.weight_bytes:.2%}",
        f"{1000 * home['excess']:.2f} ± {1000 * home['excess_error']:.2f}", f"{1000 * home['kl']:.2f}",
        f"{home['agreement']:.2%}", *(f"{1000 * text['kl']:.2f}" for text in abroad), f"{found['seconds']:.0f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def rows_of(model: Model, kept: Kept) -> Iterator[str]:
    """Lines of a model's table: peers, and what moetool makes in their bytes, by scheme."""
    options = model.options
    others = [f"KL, mnat, {Path(text).name}" for text in options.data.split(",")[1:]]
    head = ["", "bytes", "smaller by", "excess, mnat", "KL, mnat", "top-1", *others, "s"]
    yield from ("", f"## {Path(model.path).name}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|")
    for scheme in options.schemes.split(","):
        bits, group = map(int, scheme.split(":"))
        sizes = []
        for peer in (PEERS[name] for name in options.peers.split(",")):
            if bits not in peer.bits:
                continue
            sizes.append(size := model.packed_bytes(bits, group, peer.group_bytes))
            for seed in map(int, options.seeds.split(",")) if peer.takes_text else [0]:
                key = f"{model.path} {peer.name} {bits} {group} {seed} {options.iterations} {options.samples}"
                run = partial(model.by_peer, peer, bits, group, seed)
                found = kept.get(f"{key} {options.windows} {options.data}", run)
                name = f"{peer.name}, {bits} bits, groups of {group}{f', seed {seed}' if seed else ''}"
                yield row(name, model, size, found)
        for flags in options.own:
            key = f"{model.path} {flags} {min(sizes)} {options.samples} {options.windows} {options.data}"
            found = kept.get(key, partial(model.by_us, flags, min(sizes)))
            yield row(f"`{flags.removeprefix('--method ')}`", model, found["bytes"], found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--python", required=True, help="of the environment with the peers")
    parser.add_argument("--calibration", required=True)
    parser.add_argument(
        "--data", required=True, help="test text of the calibration's kind; texts of other kinds behind"
    )
    parser.add_argument("--peers", default="autoround", help=f"of {', '.join(PEERS)}, with commas")
    parser.add_argument("--own", nargs="*", default=[], metavar="OPTIONS", help="of moetool compress")
    parser.add_argument("--schemes", default="2:128,3:128,4:128,2:32,3:32,4:32", help="bits:group, with commas")
    parser.add_argument("--iterations", type=int, default=200, help="of AutoRound at its defaults")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--windows", type=int, default=200)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "moetool-peers")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    lines: list[str] = []
    for path in options.models:
        for line in rows_of(Model(path, options), Kept(options.work / "peers.jsonl")):
            lines.append(line)
            print(line, flush=True)
    own = "".join(f" {flags!r}" for flags in options.own)
    names = ",".join(Path(text).name for text in options.data.split(","))
    command = (
        f"python scripts/benchmarks/peers.py MODEL… --peers {options.peers}{' --own' * bool(own)}{own} "
        f"--calibration {Path(options.calibration).name} --data {names} --schemes {options.schemes} --iterations "
        f"{options.iterations} --samples {options.samples} --windows {options.windows} --seeds {options.seeds}"
    )
    about = (
        f"{options.samples} × {options.sequence_length} tokens to calibrate on; {options.windows} × "
        f"{options.sequence_length} test tokens of each text."
    )
    publish([made_by(command), "", about, *lines], options.output)


if __name__ == "__main__":
    main()
