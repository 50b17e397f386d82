"""Memory: how much is free, that what is freed goes back, and that a loaded model takes no more than its own."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, MixtralConfig

from moetool.architectures import MoEShape
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import ResourceError
from moetool.format.entry import format_entry
from moetool.format.families import architecture_of
from moetool.format.layout import LayerLayout
from moetool.job.memory import anonymous_bytes
from moetool.representations import parse_representation
from moetool.runtime.loading import load_model, loading_memory
from moetool.runtime.memory import (
    free_bytes,
    group_free_bytes,
    return_freed_memory,
    return_heap,
    sparing_memory,
)
from moetool.runtime.synthesis import apply_synthesis, choose_synthesis, synthesis_bytes

MIB = 1 << 20


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what is freed is the C library's business")
def test_the_heap_gives_back_what_lies_between_blocks_in_use():
    return_freed_memory()
    return_heap()
    before = anonymous_bytes()
    blocks = [torch.ones(MIB, dtype=torch.uint8) for _ in range(128)]
    assert anonymous_bytes() - before > 120 * MIB
    del blocks[::2]
    assert anonymous_bytes() - before > 110 * MIB, "the heap keeps what is free below a block in use"
    return_heap()
    assert anonymous_bytes() - before < 74 * MIB
    assert len(blocks) == 64


@pytest.mark.exhaustive
def test_products_of_many_shapes_leave_few_programs() -> None:
    """In a process of its own: oneDNN asks once how many it may keep."""
    script = """
import torch
from moetool.job.memory import anonymous_bytes
from moetool.runtime.memory import keep_few_programs, return_heap
keep_few_programs()
rows, matrix = torch.ones(400, 512).bfloat16(), torch.ones(512, 256).bfloat16()
rows[:100] @ matrix
before = anonymous_bytes()
for count in range(101, 300):
    rows[:count] @ matrix
return_heap()
print(anonymous_bytes() - before)
"""
    grown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert int(grown) < 60 * MIB


def group(root: Path, path: str, **files: int | str) -> None:
    directory = root / path
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / f"memory.{name}").write_text(f"{content}\n")


def test_the_tightest_control_group_counts(tmp_path: Path) -> None:
    group(tmp_path, "job", max=1000, current=700, stat="anon 1\ninactive_file 100\nactive_file 50")
    group(tmp_path, "job/step", max="max", current=700, stat="anon 1")
    (tmp_path / "membership").write_text("0::/job/step\n")
    assert group_free_bytes(tmp_path, tmp_path / "membership") == 450


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    files = {"limit_in_bytes": 1000, "usage_in_bytes": 990, "stat": "total_inactive_file 90"}
    group(tmp_path, "memory", **files)  # a container sees its own group as the root
    (tmp_path / "membership").write_text("5:cpu:/\n4:memory:/docker/1c2c\n0::/\n")
    assert group_free_bytes(tmp_path, tmp_path / "membership") == 100


def test_without_a_limit_the_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "membership").write_text("0::/\n")
    assert group_free_bytes(tmp_path, tmp_path / "membership") is None
    assert group_free_bytes(tmp_path, tmp_path / "absent") is None
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=7))
    assert free_bytes("cpu") == 7


@pytest.mark.parametrize("before", [None, "0"])
def test_what_spares_memory_is_undone(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with pytest.raises(RuntimeError), sparing_memory():  # noqa: PT012
        assert os.environ[name] == "1"
        raise RuntimeError
    assert os.environ.get(name) == before


# Loads a checkpoint in a process of its own: the bytes its tensors have, the peak while it is loaded, what stays.
_LOAD = """
import gc, sys, torch, moetool
from transformers import AutoModelForCausalLM
from moetool.job.memory import PeakMemory, anonymous_bytes
small, large = sys.argv[1:]
AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32)  # imports, and all that is made once
gc.collect()
before = anonymous_bytes()
with PeakMemory(0.001) as peak:
    model = AutoModelForCausalLM.from_pretrained(large, dtype=torch.float32)
tensors = [*model.parameters(), *model.buffers()]
print(sum(tensor.nbytes for tensor in tensors), peak.bytes - before, anonymous_bytes() - before)
"""


def write_compressed(path: Path, layers: int) -> Path:
    """A Mixtral of 8 MB per layer whose experts are low-rank deltas, in bf16."""
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=8,
    ).to_dict()
    config["architectures"] = ["MixtralForCausalLM"]
    shape = MoEShape(hidden=384, intermediate=1536, experts=8, top_k=2)
    layout = LayerLayout.uniform(shape, parse_representation("low-rank:48"))
    entry = format_entry(dict.fromkeys(range(layers), layout))
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": entry}, default=str))
    architecture = architecture_of(config)
    tensors: dict[str, torch.Tensor] = {
        "model.embed_tokens.weight": torch.zeros(64, 384),
        "model.norm.weight": torch.zeros(384),
        "lm_head.weight": torch.zeros(64, 384),
    }
    for layer in range(layers):
        own = f"model.layers.{layer}."
        tensors |= {f"{own}self_attn.{name}_proj.weight": torch.zeros(384, 384) for name in "qkvo"}
        tensors |= {f"{own}{name}_layernorm.weight": torch.zeros(384) for name in ("input", "post_attention")}
        tensors[architecture.router_name(layer)] = torch.zeros(8, 384)
        tensors |= {architecture.weight_name(layer, 0, role): torch.zeros(shape.matrix(role)) for role in shape.roles}
        prefix = architecture.experts_prefix(layer)
        tensors |= {prefix + name: torch.zeros(stored.shape) for name, stored in layout.own_tensors()}
    save_file(
        {name: tensor.bfloat16() for name, tensor in tensors.items()}, path / "model.safetensors", {"format": "pt"}
    )
    return path


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what is freed is the C library's business")
def test_loading_takes_no_more_than_the_model(tmp_path: Path) -> None:
    """In another dtype, so that every tensor has to be made."""
    small, large = write_compressed(tmp_path / "small", 1), write_compressed(tmp_path / "large", 8)
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, small, large], capture_output=True, text=True, check=True, timeout=120
    )
    own, peak, stays = map(int, done.stdout.split())
    assert own > 100 * MIB
    assert 0.7 * own < stays < 1.1 * own  # what the first load left free counts for the second
    assert peak < 1.1 * own


def test_what_a_model_needs_is_known_from_its_headers(tiny_mixtral_bf16: Path) -> None:
    checkpoint = Checkpoint.open(tiny_mixtral_bf16)
    stored = sum(info.nbytes for info in checkpoint.tensors.values())
    layers = {
        layer: sum(info.nbytes for name, info in checkpoint.tensors.items() if f"layers.{layer}." in name)
        for layer in range(3)
    }
    assert loading_memory(checkpoint, "auto").needed == stored + max(layers.values())
    assert loading_memory(checkpoint, torch.float32).needed == 2 * (stored + max(layers.values()))
    assert loading_memory(checkpoint, "auto", "auto").free >= loading_memory(checkpoint, "auto", "cpu").free * 0.9


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_a_model_that_does_not_fit_is_refused(device: str, tiny_mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100_000))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("it was loaded"))
    told = r"as float32 needs about [\d.]+ kB of memory, its files are [\d.]+ kB; 100\.0 kB are free on .*bfloat16"
    with pytest.raises(ResourceError, match=told):
        load_model(Checkpoint.open(tiny_mixtral), torch.float32, device)


def test_eval_says_what_it_needs_or_that_it_does_not_fit(
    tiny_mixtral: Path, tiny_text: Path, run_cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = "eval", tiny_mixtral, "--data", tiny_text, "--sequence-length", 16, "--windows", 2
    assert "Loading needs about" in run_cli(*arguments).stderr
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100_000))
    refused = run_cli(*arguments)
    assert refused.code == 4
    assert "100.0 kB are free" in refused.stderr


@pytest.fixture
def sparse(tiny_mixtral: Path, run_cli: Any, tmp_path: Path) -> Path:
    assert run_cli("compress", tiny_mixtral, tmp_path / "out", "--method", "ders-sparsify", "--drop", 0.5).code == 0
    return tmp_path / "out"


def test_what_was_chosen_for_the_experts_is_told_with_its_reason(
    sparse: Path, tiny_mixtral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, native = (load_model(Checkpoint.open(path), torch.float32) for path in (sparse, tiny_mixtral))
    experts = sum(parameter.nbytes for parameter in native.parameters() if parameter.ndim == 3)
    assert synthesis_bytes(model) == experts
    assert synthesis_bytes(native) == 0
    assert choose_synthesis(model, "on-the-fly").reason == "asked for"
    assert choose_synthesis(model, "auto").chosen == "load"
    assert choose_synthesis(native, "auto").reason == "no experts are stored as deltas"
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=experts + 1))
    tight = choose_synthesis(model, "auto")
    assert (tight.chosen, tight.needed, tight.free) == ("on-the-fly", experts, experts + 1)
    assert "are free, of which they may take half" in tight.reason
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=experts - 1))
    with pytest.raises(ResourceError, match=r"Dense experts take .* --synthesize on-the-fly|Leave them"):
        apply_synthesis(model, "load")
    monkeypatch.undo()
    assert apply_synthesis(model, "load").chosen == "load"
    assert synthesis_bytes(model) == 0
