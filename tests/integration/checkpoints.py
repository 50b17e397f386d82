"""What the tests of the command line do to checkpoints: copy, damage, compare, run."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from words import overridden

import moetool
from moetool.quiet import quiet
from moetool.runtime.loading import model_class

WEIGHTS = "model.safetensors"
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "MOETOOL_MEASURE": "off"}
COSTS = {("moetool", "costs.json"), (".moetool", "costs.json")}
COMMAND_LINE = "from moetool.cli import main; main()"


def contents(directory: Path, *, costs: bool = False) -> dict[str, bytes]:
    """Every file below a directory, by relative path, but the note of who has written there last, and what it cost."""
    left_out = {(".moetool", "lock"), *(() if costs else COSTS)}
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.parts[-2:] not in left_out
    }


def weights(directory: Path) -> dict[str, bytes]:
    """The weight files and their index, if there is one."""
    return {name: data for name, data in contents(directory).items() if name.startswith("model") and "/" not in name}


def divergence(one: Tensor, other: Tensor) -> float:
    """KL of the predictions of one's logits `[…, vocabulary]` from the other's, mean over all tokens, in nats."""
    ours, theirs = (logits.double().log_softmax(-1) for logits in (one, other))
    return (theirs.exp() * (theirs - ours)).sum(-1).mean().item()


def check_packed_alike(one: Path, other: Path) -> None:
    """Packed experts of the same job, but for sums in another order: these may turn a code that lies between two."""
    ours, theirs = tensors_of(one), tensors_of(other)
    assert ours.keys() == theirs.keys()
    words = [name for name in ours if name.endswith("weight_packed")]
    assert sum(float((ours[name] == theirs[name]).float().mean()) for name in words) / len(words) > 0.999
    same = ours.keys() - {name for name in ours if name.endswith(("weight_packed", "weight_scale"))}
    assert all(ours[name].equal(theirs[name]) for name in same)


def weight_bytes(directory: Path) -> int:
    """Bytes of the weight files, without the index."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def config_of(directory: Path) -> dict[str, Any]:
    """`config.json`."""
    return json.loads((directory / "config.json").read_text())


def change_config(directory: Path, **changes: Any) -> Path:
    """Patch `config.json`; `None` removes a key. Returns the directory."""
    patched = {**config_of(directory), **changes}
    kept = {key: value for key, value in patched.items() if value is not None or key not in changes}
    (directory / "config.json").write_text(json.dumps(kept, indent=2))
    return directory


def change_tensors(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Rewrite a checkpoint's only weight file after `change(tensors)`. Returns the directory."""
    tensors = {name: tensor.clone() for name, tensor in load_file(directory / WEIGHTS).items()}
    change(tensors)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    return directory


def swap_tokens(directory: Path) -> Path:
    """Let two tokens of a tokenizer change places. Returns the directory."""
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    one, two = list(vocabulary)[5:7]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    file.write_text(json.dumps(content))
    return directory


def copy_of(source: Path, target: Path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(source, target))


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model, as a user of transformers gets it."""
    with quiet():
        return model_class(config_of(path)).from_pretrained(path, dtype=dtype).eval()


def load_whole(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The same in one dtype, with every weight of the files in its place, and no weight that is not in the files."""
    with quiet():
        kind = model_class(config_of(path))
        model, told = kind.from_pretrained(path, dtype=dtype, output_loading_info=True)
    assert not {kind: told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if told[kind]}
    return model.eval()


def tensors_of(directory: Path) -> dict[str, Tensor]:
    """Every tensor of all weight files."""
    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def relative_error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def assert_close(found: Tensor, expected: Tensor, error: float = 1e-5) -> None:
    """To within an error relative to the largest number that is expected."""
    torch.testing.assert_close(found, expected, rtol=0, atol=error * expected.abs().max().item())


@contextlib.contextmanager
def ffn_inputs(model: Any, ffn: str) -> Iterator[dict[int, list[Tensor]]]:
    """What the feed-forward networks of a dense model are given for the time of a `with` block, by layer, as rows
    `[tokens, hidden]`; `ffn` is the path of one, with `{layer}`."""
    seen: dict[int, list[Tensor]] = {layer: [] for layer in range(model.config.num_hidden_layers)}
    handles = [
        model.get_submodule(ffn.format(layer=layer)).register_forward_pre_hook(
            lambda _, inputs, layer=layer: seen[layer].append(inputs[0].detach().flatten(0, -2))
        )
        for layer in seen
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def logits(path: Path, tokens: Tensor) -> Tensor:
    """fp32 logits `[batch, length, vocabulary]` of a checkpoint that transformers loads."""
    return load(path)(input_ids=tokens).logits


def check_use(run_cli: Any, path: Path, original: Path, tokens: Tensor, work: Path) -> None:
    """A compressed checkpoint predicts the same for few tokens and many, made dense, and exported; and verifies."""
    expected = logits(path, tokens)
    assert relative_error(logits(path, tokens[:, :5]), expected[:, :5]) < 1e-4, "few tokens find their matrices"
    with torch.no_grad():
        dense = moetool.synthesize(load(path))(tokens).logits
    assert relative_error(dense, expected) < 1e-4
    assert run_cli("export", path, work / "dense").code == 0
    assert relative_error(logits(work / "dense", tokens), expected) < 1e-4
    assert run_cli("verify", path, "--against", original).code == 0


def python(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Another Python, on one thread."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=ONE_THREAD, check=False)


class CrashDriver:
    """A process that runs `crash_driver.py`; see there."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("crash_driver.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=ONE_THREAD,
        )

    def __call__(
        self,
        output: Path,
        arguments: Sequence[object],
        at: int | str | None = None,
        sent: str = "SIGKILL",
        ranks: int = 1,
        rank: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Run `(command, source, *options)` to `output` in `ranks` processes, as a launcher with such an `environment`
        does, and send the signal to the one numbered `rank` before its `at`-th change to it."""
        command, source, *options = overridden(arguments)
        line = [command, source, str(output), *options]
        job = {"arguments": line, "watched": str(output), "at": at, "signal": sent, "ranks": ranks, "rank": rank}
        job["environment"] = dict(environment or {})
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def whole(self, output: Path, arguments: Sequence[object]) -> int:
        """Run a command to its end: how many changes it makes to `output`."""
        told = self(output, arguments)
        assert told["code"] == 0, told["stderr"]
        return told["changes"]

    def goes_on(self, output: Path, arguments: Sequence[object], at: int, expected: Path) -> None:
        """Killed before its `at`-th change and resumed, a command leaves what is in `expected`, to the byte."""
        assert self(output, arguments, at=at)["code"] == -signal.SIGKILL
        last = self(output, (*arguments, "--resume"))
        assert last["code"] == 0, (at, last["stderr"])
        assert contents(output) == contents(expected), at

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
