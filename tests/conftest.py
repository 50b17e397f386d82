"""What tests share: a tiny Mixtral on disk, a tokenizer and a text for it, and the command line in-process.

Everything is made from seeds, without a network, and session-scoped: treat what a fixture returns as read-only.
"""

import contextlib
import copy
import gc
import io
import json
import os
import random
import shutil
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast
from words import overridden

from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.reader import Checkpoint
from moetool.costs.machine import Machine
from moetool.format.entry import format_entry
from moetool.format.families import architecture_of
from moetool.format.layout import BASE_CHANNELS, LayerLayout
from moetool.quiet import quiet
from moetool.representations.dense import Dense

VOCABULARY = 288
END = "<|end|>"
NEVER = "\u0100"  # how byte-level tokenizers write byte 0
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}

# How far apart the experts are, relative to what they share.
DIFFERENCE = 0.4


@dataclass(frozen=True)
class Result:
    """What a run of the command line left behind."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """stdout as the one JSON object that `--json` promises."""
        return json.loads(self.stdout)


RunCli = Callable[..., Result]
MakeMixtral = Callable[..., Any]
SaveModel = Callable[..., Path]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="there is no card"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices: a second thread costs more than it gives, and sums in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_the_disk() -> Iterator[None]:
    """Synced files outlive a machine that goes down, which no test does, and take half of a tiny job's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(scope="module", autouse=True)
def little_to_collect() -> None:
    """The garbage collector leaves alone what is there by now, thousands of tests and all of transformers: to look at
    that took it a third of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .txt file of about 40,000 characters: sentences from a small grammar, with numbers and some accents."""
    draw = random.Random(0)
    letters, vowels = "bcdfghjklmnprstvz", "aeiouyé"
    words = ["".join(draw.choice(letters) + draw.choice(vowels) for _ in range(draw.randint(1, 4))) for _ in range(400)]
    paragraphs = []
    while sum(map(len, paragraphs)) < 40_000:
        sentences = []
        for _ in range(draw.randint(2, 6)):
            # Squaring the draw makes some words common and most rare, as in a language.
            chosen = [words[int(len(words) * draw.random() ** 2)] for _ in range(draw.randint(4, 12))]
            if draw.random() < 0.2:
                chosen.insert(draw.randrange(len(chosen)), str(draw.randint(0, 9999)))
            sentences.append(" ".join(chosen).capitalize() + draw.choice(".?!"))
        paragraphs.append(" ".join(sentences))
    path = tmp_path_factory.mktemp("text") / "tiny.txt"
    path.write_text("\n\n".join(paragraphs), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_text: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `VOCABULARY` tokens, trained on `tiny_text`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([tiny_text.read_text(encoding="utf-8")], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


@pytest.fixture(scope="session")
def bos_tokenizer(tiny_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The same with a BOS token that no text has, which begins every text, as Gemma's does."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_special_tokens({"bos_token": NEVER})
    assert len(tokenizer) == VOCABULARY
    template = processors.TemplateProcessing(
        single=f"{NEVER} $A", pair=f"{NEVER} $A $B", special_tokens=[(NEVER, tokenizer.bos_token_id)]
    )
    tokenizer.backend_tokenizer.post_processor = template
    return tokenizer


@pytest.fixture(scope="session")
def masking_tokenizer(tiny_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The same for an encoder: one token that no text has hides others, `END` marks beginning and end."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_special_tokens({"mask_token": NEVER, "cls_token": END, "sep_token": END})
    assert len(tokenizer) == VOCABULARY
    return tokenizer


@pytest.fixture(scope="session")
def tiny_tokens(tiny_tokenizer: PreTrainedTokenizerFast, tiny_text: Path) -> torch.Tensor:
    """All of `tiny_text` as one stream of token ids, int64."""
    text = tiny_text.read_text(encoding="utf-8")
    return torch.tensor(tiny_tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


@pytest.fixture(scope="session")
def make_mixtral() -> MakeMixtral:
    """`make_mixtral(seed=0, dtype=torch.float32, **config)`: a random `MixtralForCausalLM`, `SIZES` by default.

    Experts are one shared matrix plus differences `DIFFERENCE` times as large. Scales are those of a trained model,
    so that routing varies, experts matter to the loss and gradients are well above rounding.
    """

    def make(seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
        config = MixtralConfig(**{**SIZES, **overrides})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = MixtralForCausalLM(config).eval()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if parameter.ndim == 3:
                        own = torch.randn(parameter.shape)
                        parameter.copy_(
                            (torch.randn(parameter.shape[1:]) + DIFFERENCE * own) / parameter.shape[-1] ** 0.5
                        )
                    elif parameter.ndim == 2:
                        scale = 2.0 if name.endswith("mlp.gate.weight") else 1.0
                        parameter.copy_(torch.randn(parameter.shape) * scale / parameter.shape[-1] ** 0.5)
                    else:
                        parameter.copy_(1 + 0.1 * torch.randn(parameter.shape))
        return model.to(dtype)

    return make


@pytest.fixture(scope="session")
def save_model(tiny_tokenizer: PreTrainedTokenizerFast) -> SaveModel:
    """`save_model(model, path, **save_pretrained_options)`: a checkpoint with tokenizer files; returns the path."""

    def save(model: Any, path: Path, **options: Any) -> Path:
        with quiet():
            model.save_pretrained(path, **options)
            tiny_tokenizer.save_pretrained(path)
        return path

    return save


@pytest.fixture(scope="session")
def tiny_mixtral(make_mixtral: MakeMixtral, save_model: SaveModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved fp32 Mixtral of `SIZES` in the hub's layout, with tokenizer files. Read-only: copy it to change it."""
    return save_model(make_mixtral(), tmp_path_factory.mktemp("models") / "tiny-mixtral")


@pytest.fixture(scope="session")
def tiny_mixtral_bf16(
    make_mixtral: MakeMixtral, save_model: SaveModel, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The same model stored in bf16."""
    return save_model(make_mixtral(dtype=torch.bfloat16), tmp_path_factory.mktemp("models") / "tiny-mixtral-bf16")


@pytest.fixture(scope="session")
def reshard(save_model: SaveModel) -> SaveModel:
    """`reshard(source, target, max_shard_size)`: save a checkpoint again, cut into smaller files; returns `target`."""

    def save(source: Path, target: Path, max_shard_size: int | str = "100KB") -> Path:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(source)
        return save_model(model, target, max_shard_size=max_shard_size)

    return save


@pytest.fixture(scope="session")
def tiny_mixtral_sharded(tiny_mixtral: Path, reshard: SaveModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_mixtral` in several weight files with an index."""
    path = reshard(tiny_mixtral, tmp_path_factory.mktemp("models") / "tiny-mixtral-sharded", "100KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


@pytest.fixture(scope="session")
def make_compressed() -> Callable[..., Path]:
    """`make_compressed(source, target, layouts, seed=0)`: a moetool checkpoint written by hand; returns `target`.

    `layouts` gives the `LayerLayout` of some layers of `source`, the others stay native. Experts stored `dense` are
    those of `source`, bases are the plain mean, and factors are random: the files are right, the model is not `source`.
    """

    def make(source: Path, target: Path, layouts: Mapping[int, LayerLayout], seed: int = 0) -> Path:
        generator = torch.Generator().manual_seed(seed)
        checkpoint = Checkpoint.open(source)
        reader = ExpertReader(checkpoint, architecture_of(checkpoint.config))
        tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
        for layer, layout in layouts.items():
            prefix = reader.architecture.experts_prefix(layer)
            native = {name: tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
            kept = torch.randperm(reader.shape.intermediate, generator=generator)[: layout.base_channels].sort().values
            for role, weights in layout.weights.items():
                names = [reader.architecture.weight_name(layer, e, role) for e in range(reader.shape.experts)]
                if weights is None:
                    tensors.update({name: native[name] for name in names})
                    continue
                mean = torch.stack([native[name].float() for name in names]).mean(0).to(reader.dtype)
                tensors[names[0]] = mean.index_select(1 if role == "down" else 0, kept)
                for expert, weight in enumerate(weights):
                    own = f"{prefix}moetool.{expert}.{role}."
                    for name, entry in weight.tensors(reader.shape.matrix(role)).items():
                        size = entry.shape
                        scale = 0.5 / size[1] ** 0.5
                        value = torch.randn(size, generator=generator) * scale
                        tensors[own + name] = native[names[expert]] if weight == Dense() else value.to(reader.dtype)
            if layout.is_pruned:
                tensors[prefix + BASE_CHANNELS] = kept.int()
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
        config = {**checkpoint.config, "quantization_config": format_entry(layouts)}
        (target / "config.json").write_text(json.dumps(config))
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
        return target

    return make


@pytest.fixture(scope="session")
def synthesize() -> Callable[[Path], dict[str, torch.Tensor]]:
    """`synthesize(path)`: the tensors of an ordinary checkpoint that a moetool checkpoint stands for, in fp32.

    From the names in the file and `W = base + U V` alone, with zeros where the base was pruned: a second opinion on
    everything that reads moetool checkpoints. Dynamic pruning is left out.
    """

    def read(path: Path) -> dict[str, torch.Tensor]:
        config = json.loads((path / "config.json").read_text())
        stored = {}
        for file in path.glob("*.safetensors"):
            stored.update(load_file(file))
        for layer, layout in config["quantization_config"]["layers"].items():
            prefix = f"model.layers.{layer}.block_sparse_moe.experts."
            kept = stored.pop(prefix + "base_channels", torch.arange(config["intermediate_size"])).long()
            for role, name in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
                if layout[role] is None:
                    continue
                base = stored.pop(f"{prefix}0.{name}.weight").float()
                full = torch.zeros(config["intermediate_size"], config["hidden_size"])
                full[kept] = base.T if role == "down" else base
                for expert in range(config["num_local_experts"]):
                    own = {
                        tensor: stored.pop(f"{prefix}moetool.{expert}.{role}.{tensor}", None)
                        for tensor in ("matrix", "u", "v")
                    }
                    matrix = full.T if role == "down" else full
                    if own["matrix"] is not None:
                        matrix = own["matrix"]
                    elif own["u"] is not None:
                        matrix = matrix + own["u"].float() @ own["v"].float()
                    stored[f"{prefix}{expert}.{name}.weight"] = matrix
        assert not [name for name in stored if "moetool" in name]
        return {name: tensor.float().contiguous() for name, tensor in stored.items()}

    return read


@pytest.fixture(scope="session", autouse=True)
def measured_machine() -> Iterator[Machine]:
    """A machine that nobody has to measure; processes that tests start do without one."""
    machine = Machine(
        products={"bfloat16": 4e11, "float32": 4e10, "float64": 2e10, "widened": 8e10},
        eigen={100: 0.001, 400: 0.02},
        cholesky={100: 0.0001, 400: 0.002},
        moved=2e10,
        hashed=1e9,
        read=1e9,
        written=5e8,
        call=2e-6,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOETOOL_MEASURE", "off")
        patch.setenv("MOETOOL_KERNELS", "exact")  # as the matrices are that tests compare with
        for user in ("moetool.job.estimate", "moetool.measure.hardware"):
            patch.setattr(f"{user}.this_machine", lambda device, output: machine)
        yield machine


@pytest.fixture(scope="session")
def run_cli() -> RunCli:
    """`run_cli("compress", source, target, "--json") -> Result`: the `moetool` script, in this process.

    Arguments are turned into strings; of an option that is there twice the last counts. Exit codes are those of the
    script: an exception that nobody caught, a bug, ends with code 1 and its traceback on stderr.
    """

    def run(*arguments: object) -> Result:
        from moetool.cli import main

        stdout, stderr = io.StringIO(), io.StringIO()
        argv, hook, program = sys.argv, sys.excepthook, sys.modules["__main__"]
        sys.argv = ["moetool", *overridden(arguments)]
        sys.modules["__main__"] = types.ModuleType("__main__")  # click takes the program's name from it
        try:
            with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
                code = _exit_code(main)
        finally:
            sys.argv, sys.excepthook, sys.modules["__main__"] = argv, hook, program
        return Result(code, stdout.getvalue(), stderr.getvalue())

    return run


def _exit_code(main: Callable[[], None]) -> int:
    try:
        main()
    except SystemExit as exit:
        if exit.code is None or isinstance(exit.code, int):
            return exit.code or 0
        print(exit.code, file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    return 0
