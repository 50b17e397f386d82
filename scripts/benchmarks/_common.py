"""What the benchmarks share."""

import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

ResultT = TypeVar("ResultT")


class Kept:
    """Results by key, each appended to a file as soon as there is one: a run that was stopped goes on where it was."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = file.read_text().splitlines() if file.exists() else []
        self._results: dict[str, dict[str, Any]] = {line["key"]: line for line in map(json.loads, lines)}

    def get(self, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of that key, made if there is none."""
        if key not in self._results:
            self._results[key] = {"key": key, **make()}
            with self._file.open("a") as file:
                file.write(json.dumps(self._results[key]) + "\n")
        return self._results[key]


def write_tokenizer(directory: Path, vocabulary: int) -> None:
    """Of a random model: every token is a word of its own."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(directory)


def write_random_text(file: Path, vocabulary: int, tokens: int) -> None:
    """So many words of that tokenizer."""
    import torch

    ids = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(0))
    file.write_text(" ".join(f"w{i}" for i in ids.tolist()))


def publish(lines: Sequence[str], file: Path | None) -> None:
    """Print a table, and write it to a file if there is one."""
    text = "\n".join(lines) + "\n"
    print(text)
    if file:
        file.write_text(text)


def publish_as_made(head: Sequence[str], rows: Iterable[str], file: Path | None) -> None:
    """Print every row of a table on stderr as soon as it is made, and publish the whole at the end."""
    lines = [*head]
    for row in rows:
        lines.append(row)
        print(row, file=sys.stderr, flush=True)
    publish(lines, file)


def excess(perplexity: float, original: float) -> float:
    """How much loss a perplexity is above the original's, in nats."""
    return math.log(perplexity / original)


def made_by(command: str) -> str:
    """The line that says where a table came from."""
    import torch

    return f"Made by `{command}` with torch {torch.__version__} on {platform.machine()}."


def processor() -> str:
    """Its name."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    names = [line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def race(
    methods: Mapping[str, Callable[[], ResultT]], repeats: int, device: "torch.device | None" = None
) -> tuple[dict[str, list[float]], dict[str, ResultT]]:
    """Seconds of every method in every round, by `process_time` or on a card by the clock, and what each gave in one
    more round before them, which warms up."""
    results = {name: method() for name, method in methods.items()}
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repeats):
        for name, method in methods.items():
            seconds[name].append(_seconds(method, device))
    return seconds, results


def _seconds(method: Callable[[], object], device: "torch.device | None") -> float:
    if device is None or device.type != "cuda":
        start = time.process_time()
        method()
        return time.process_time() - start
    wait(device)
    start = time.perf_counter()
    method()
    wait(device)
    return time.perf_counter() - start


def wait(device: "torch.device") -> None:
    """Until a card has done what it was given."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
