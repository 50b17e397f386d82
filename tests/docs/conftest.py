"""Models and texts for what the documentation shows, so small that all of it runs."""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pages import EARLIER, FILES, MODELS, NOT_RUN, ROOT, SHELL, Block, blocks, commands, smaller
from transformers import LlamaConfig, LlamaForCausalLM

from moetool.measure.bench.options import BenchOptions
from moetool.measure.bench.runner import HereRunner
from moetool.quiet import quiet

SIZES: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="session")
def documented_moe(
    make_mixtral: Callable[..., Any], save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A Mixtral in bf16, wide enough for every ratio that the pages show, of one layer. Read-only."""
    model = make_mixtral(dtype=torch.bfloat16, **SIZES, num_local_experts=8)
    return save_model(model, tmp_path_factory.mktemp("documented") / "mixtral")


@pytest.fixture(scope="session")
def documented_deeper(
    make_mixtral: Callable[..., Any], save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A Mixtral of two layers, with the vocabulary of `documented_moe`. Read-only."""
    model = make_mixtral(dtype=torch.bfloat16, **{**SIZES, "num_hidden_layers": 2}, num_local_experts=2)
    return save_model(model, tmp_path_factory.mktemp("documented") / "deeper")


@pytest.fixture(scope="session")
def documented_dense(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in bf16. Read-only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(**SIZES, bos_token_id=0, eos_token_id=0, initializer_range=0.1)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    return save_model(model, tmp_path_factory.mktemp("documented") / "llama")


@pytest.fixture(scope="session")
def instructions(tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .jsonl file of prompts and completions."""
    sentences = tiny_text.read_text(encoding="utf-8").split(". ")[:40]
    path = tmp_path_factory.mktemp("documented") / "instructions.jsonl"
    records = [{"prompt": one, "completion": two} for one, two in zip(sentences[::2], sentences[1::2], strict=True)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="session")
def documented_text(tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The beginning of `tiny_text`."""
    path = tmp_path_factory.mktemp("documented") / "text.txt"
    path.write_text(tiny_text.read_text(encoding="utf-8")[:12_000])
    return path


@pytest.fixture(scope="session")
def held_out_text(tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its end."""
    path = tmp_path_factory.mktemp("documented") / "held-out.txt"
    path.write_text(tiny_text.read_text(encoding="utf-8")[-12_000:])
    return path


@pytest.fixture(scope="session")
def quantized_file(run_cli: Callable[..., Any], documented_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of `documented_moe` in 4 bits."""
    path = tmp_path_factory.mktemp("documented") / "gguf"
    assert run_cli("export", documented_moe, path, "--format", "gguf", "--type", "q4_0").code == 0
    return path / "model.gguf"


@pytest.fixture(scope="session")
def recorded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a command that writes a model prints with `--json`."""
    told = {"stage": "d2moe", "input": "a", "output": "mixtral-40", "seconds": 2.5, "peak_memory_bytes": 10**9}
    path = tmp_path_factory.mktemp("recorded") / "run.json"
    path.write_text(json.dumps({**told, "phases": [{"name": "Forward", "seconds": 2.0}]}))
    return path


@pytest.fixture(scope="session")
def recorded_evaluation(
    run_cli: Callable[..., Any], documented_moe: Path, held_out_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """What `eval` prints with it."""
    path = tmp_path_factory.mktemp("recorded") / "eval.json"
    windows = ("--sequence-length", 32, "--windows", 4)
    path.write_text(run_cli("eval", documented_moe, "--data", held_out_text, *windows, "--json").stdout)
    return path


@dataclass(frozen=True)
class Shown:
    """A command as a page shows it, and what it printed with `--json`."""

    page: str
    arguments: list[str]
    result: dict[str, Any]


class InThisProcess(HereRunner):
    """Runner of `bench --against` that starts no process; tests/measure/bench/test_runner.py has those that do."""

    def __init__(self, path: str, options: BenchOptions, threads: int) -> None:
        super().__init__(path, options)

    def close(self) -> None:
        """Do nothing: there is no process to end."""


class Reader:
    """Runs what pages show, in one directory for all of them; a command that two pages show, once."""

    def __init__(self, run_cli: Callable[..., Any], fixtures: dict[str, Path], root: Path) -> None:
        self._run_cli, self._fixtures, self._root = run_cli, fixtures, root
        self._read: dict[str, list[Shown]] = {}
        self._told: dict[tuple[str, ...], dict[str, Any]] = {}
        for name, fixture in FILES.items():
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).symlink_to(fixtures[fixture])
        (root / "config-alone").mkdir()
        shutil.copy(fixtures["documented_moe"] / "config.json", root / "config-alone")
        (root / "config-in-fp8").mkdir()
        config = json.loads((root / "config-alone" / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [8, 8]}
        (root / "config-in-fp8" / "config.json").write_text(json.dumps(config))

    def read(self, page: str) -> list[Shown]:
        """Run the page's blocks one after the other, if that was not done; every command, in order."""
        if page not in self._read:
            for earlier in EARLIER.get(page, []):
                self.read(earlier)
            with contextlib.chdir(self._root):
                self._read[page] = [shown for block in blocks(page) for shown in self._run(page, block)]
        return self._read[page]

    def _run(self, page: str, block: Block) -> Iterator[Shown]:
        where = f"{page}:{block.line}"
        if block.language == "python":
            with quiet():
                exec(compile("\n".join(block.lines), where, "exec"), {})
        elif block.language in SHELL:
            for words in commands(block):
                if words[0] in NOT_RUN:
                    continue
                assert words[0] == "moetool", f"{where}: what is {words[0]}?"
                yield Shown(page, words[1:], self._told_by(where, words[1:]))

    def run(self, arguments: list[str]) -> dict[str, Any]:
        """What a command prints that no page shows."""
        with contextlib.chdir(self._root):
            return self._told_by("pages.py", arguments)

    def _told_by(self, where: str, shown: list[str]) -> dict[str, Any]:
        key = tuple(shown)
        if key not in self._told:
            arguments = [str(self._fixtures.get(MODELS.get(word, ""), word)) for word in smaller(list(key))]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("moetool.measure.bench.benchmark.ThereRunner", InThisProcess)
                result = self._run_cli(*self._with_models(arguments), "--json")
            assert result.code == 0, f"{where}: {' '.join(shown)}\n{result.stderr}"
            self._told[key] = result.json
        return self._told[key]

    def _with_models(self, arguments: list[str]) -> list[str]:
        """A preset of models names them, too."""
        place = arguments.index("--preset") + 1 if "--preset" in arguments else 0
        if not arguments[place].endswith(".yaml"):
            return arguments
        preset = yaml.safe_load((ROOT / arguments[place]).read_text(encoding="utf-8"))
        for source in preset["options"]["sources"]:
            source["source_model"] = str(self._fixtures["documented_dense"])
        Path("preset.yaml").write_text(yaml.safe_dump(preset))
        return [*arguments[:place], "preset.yaml", *arguments[place + 1 :]]


@pytest.fixture(scope="session")
def reader(
    run_cli: Callable[..., Any], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Reader:
    """What runs a page."""
    names = {*MODELS.values(), *FILES.values()}
    fixtures = {name: request.getfixturevalue(name) for name in names}
    return Reader(run_cli, fixtures, tmp_path_factory.mktemp("pages"))
