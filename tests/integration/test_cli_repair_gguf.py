"""`moetool repair FILE.gguf`: the model learns, and its file stays what it was but for scales and plain numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_models import READ_MODELS, gguf_model
from sampling import sampled
from scrambled import scrambled
from torch import Tensor

from moetool.format.gguf.blocks import BLOCK_TYPES
from moetool.repair.training import Distilling

gguf = pytest.importorskip("gguf", reason="wants the library gguf: pip install moetool[gguf]")

SHORT = ("--samples", 8, "--sequence-length", 32, "--held-out", 4, "--batch-size", 4)
# Originals that no text can go through layer by layer.
NOT_STREAMED = ("glm_moe_dsa-shared", "gemma4_text-sharing", "gemma4_text-sharing-dense")
# Norms of more than they say, experts and matrices that lie turned, latent attention, states, biases.
STRUCTURES = ("gpt_oss", "deepseek_v3", "gemma3", "gpt2", "llama4_text", "qwen3_next")
# Matrices whose inputs a file has in another order, that transformers cuts apart, or whose choices have no gradient.
_INDEXERS = ("indexer.attn_k.weight", "indexer.proj.weight")
LEFT = {
    "qwen3_5_moe_text": ("ssm_out.weight",),
    "qwen3_5_text": ("ssm_out.weight",),
    "qwen3_5_moe": ("ssm_out.weight",),
    "sarvam_moe": ("attn_qkv.weight",),
    "sarvam_moe-partial": ("attn_qkv.weight",),
    "deepseek_v32": _INDEXERS,
    "deepseek_v32-scores": _INDEXERS,
    "glm_moe_dsa": _INDEXERS,
}
Export = Callable[..., Path]
Repair = Callable[..., Any]


@pytest.fixture
def export(run_cli: Any, tmp_path: Path) -> Export:
    def run(source: Path, *options: object) -> Path:
        result = run_cli("export", source, tmp_path / "file", "--format", "gguf", *options)
        assert result.code == 0, result.stderr
        return tmp_path / "file" / "model.gguf"

    return run


@pytest.fixture
def repair(run_cli: Any, tmp_path: Path, tiny_text: Path) -> Repair:
    def run(file: Path, to: Path, *options: object, name: str = "out") -> Any:
        words = ("--to", to, "--calibration", tiny_text, *SHORT, *options, "--json")
        return run_cli("repair", file, tmp_path / name, *words)

    return run


@pytest.fixture
def coarse(export: Export, tiny_mixtral: Path) -> Path:
    return export(tiny_mixtral, "--type", "q4_0", "--experts-type", "iq4_nl")


def tensors_in(file: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}


def head_of(file: Path) -> bytes:
    """All that stands before the first tensor's numbers."""
    return file.read_bytes()[: min(tensor.data_offset for tensor in tensors_in(file).values())]


def factors_between(before: Any, after: Any) -> Tensor:
    """By what the numbers of each block of a tensor were multiplied `[blocks]`; checks that all were by the same."""
    size = BLOCK_TYPES[before.tensor_type.name.lower()].numbers
    old, new = (
        torch.from_numpy(gguf.quants.dequantize(one.data, one.tensor_type).copy()).reshape(-1, size).double()
        for one in (before, after)
    )
    energy = old.square().sum(1)
    factors = torch.where(energy > 0, (new * old).sum(1) / energy, 1)
    torch.testing.assert_close(new, factors[:, None] * old, rtol=2e-3, atol=1e-7)
    return factors


def test_a_file_comes_nearer_to_its_original_in_as_many_bytes(
    coarse: Path, repair: Repair, run_cli: Any, tiny_mixtral: Path, tiny_text: Path, tmp_path: Path
) -> None:
    result = repair(coarse, tiny_mixtral, "--steps", 12, "--learning-rate", 0.01, "--samples", 32)
    assert result.code == 0, result.stderr
    assert result.json["kept_step"] > 0
    assert result.json["bytes_before"] == result.json["bytes_after"] == coarse.stat().st_size
    made = tmp_path / "out" / "model.gguf"
    assert made.stat().st_size == coarse.stat().st_size
    assert head_of(made) == head_of(coarse)
    assert (tmp_path / "out" / "Modelfile").read_text() == (coarse.parent / "Modelfile").read_text()
    before, after = tensors_in(coarse), tensors_in(made)
    changed = set()
    for name, tensor in before.items():
        if tensor.tensor_type.name.lower() in BLOCK_TYPES:
            assert factors_between(tensor, after[name]).sub(1).abs().max() < 0.2
        if tensor.data.tobytes() != after[name].data.tobytes():
            changed.add(name)
    assert {"blk.0.ffn_gate_inp.weight", "output_norm.weight", "blk.2.ffn_gate_exps.weight", "output.weight"} <= changed
    words = ("--data", tiny_text, "--sequence-length", 32, "--windows", 16, "--against", tiny_mixtral, "--json")
    lost = [run_cli("eval", file, *words).json["against"]["kl"] for file in (coarse, made)]
    assert 0 < lost[1] < lost[0]
    assert run_cli("verify", tmp_path / "out").code == 0
    assert repair(coarse, tiny_mixtral, "--steps", 12, "--learning-rate", 0.01, "--samples", 32, name="2").code == 0
    assert (tmp_path / "2" / "model.gguf").read_bytes() == made.read_bytes()


@pytest.mark.parametrize("name", sampled([name for name in READ_MODELS if name not in NOT_STREAMED], STRUCTURES))
def test_all_scales_of_a_family_can_learn(
    name: str,
    export: Export,
    repair: Repair,
    tiny_tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is written is what was trained, which the job itself proves; here, that nothing was left out."""

    monkeypatch.setattr(Distilling, "run", scrambled)
    source = tmp_path / "model"
    gguf_model(name).save_pretrained(source)
    tiny_tokenizer.save_pretrained(source)
    file = export(source, "--type", "q4_0")
    result = repair(file, source)
    assert result.code == 0, result.stderr
    before, after = tensors_in(file), tensors_in(tmp_path / "out" / "model.gguf")
    same = {name for name, tensor in before.items() if tensor.data.tobytes() == after[name].data.tobytes()}
    blocks = {name for name, tensor in before.items() if tensor.tensor_type.name.lower() in BLOCK_TYPES}
    assert not {own for own in same & blocks if not own.endswith(LEFT.get(name, ()))}
    for own in blocks - same:
        assert 1 < factors_between(before[own], after[own]).mean() < 1.1


def test_killed_while_it_writes_it_goes_on_there(
    coarse: Path, repair: Repair, tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--steps", 4, "--learning-rate", 0.01)
    assert repair(coarse, tiny_mixtral, *words, name="whole").code == 0

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("moetool.repair.gguf_student.write_rescaled", fail)
        assert repair(coarse, tiny_mixtral, *words).code == 130
    assert not (tmp_path / "out" / "model.gguf").exists()
    monkeypatch.setattr("moetool.repair.training.Distilling.run", fail)  # which is not done again
    result = repair(coarse, tiny_mixtral, *words, "--resume")
    assert result.code == 0, result.stderr
    whole, cut = (tmp_path / name / "model.gguf" for name in ("whole", "out"))
    assert whole.read_bytes() == cut.read_bytes()


def test_what_makes_no_sense_for_a_file_is_refused(
    coarse: Path,
    export: Export,
    repair: Repair,
    dense: Any,
    make_mixtral: Any,
    save_model: Any,
    tiny_mixtral: Path,
    tmp_path: Path,
) -> None:
    other = save_model(make_mixtral(hidden_size=64), tmp_path / "other")
    result = repair(coarse, other, "--dry-run")
    assert result.code == 3
    assert "hidden_size 32" in result.stderr
    result = repair(coarse, dense("llama"), "--dry-run")
    assert result.code == 3
    assert "has experts, and --to" in result.stderr
    result = repair(tmp_path / "nothing.gguf", tiny_mixtral, "--dry-run")
    assert result.code == 3
    assert "No such file" in result.stderr
    llama = dense("llama")
    file = export(llama, "--type", "q4_0", "--overwrite")
    for words, said in (
        (("--routing", 3), "--routing: a dense model has no routers"),
        (("--train", "routers"), "--train routers: this model has no routers"),
        (("--train", "all"), "--train all: codes in a GGUF file stay as they are"),
        (("--calibration", "self"), "--calibration self: a GGUF file is repaired on a text"),
    ):
        result = repair(file, llama, *words)
        assert result.code == 2
        assert said in result.stderr


def test_routers_alone_leave_all_codes_as_they_are(
    coarse: Path, repair: Repair, tiny_mixtral: Path, tmp_path: Path
) -> None:
    words = ("--train", "routers", "--steps", 8, "--learning-rate", 0.02, "--samples", 32)
    result = repair(coarse, tiny_mixtral, *words)
    assert result.code == 0, result.stderr
    before, after = tensors_in(coarse), tensors_in(tmp_path / "out" / "model.gguf")
    changed = {name for name in before if before[name].data.tobytes() != after[name].data.tobytes()}
    assert changed <= {f"blk.{layer}.ffn_gate_inp.weight" for layer in range(3)}
    assert changed or result.json["kept_step"] == 0


def test_a_plan_tells_what_the_file_takes(coarse: Path, repair: Repair, tiny_mixtral: Path) -> None:
    plan = repair(coarse, tiny_mixtral, "--dry-run")
    assert plan.code == 0, plan.stderr
    assert plan.json["output_bytes"] == coarse.stat().st_size


def test_its_card_tells_of_both_steps_and_a_plan_knows_the_run(
    coarse: Path, repair: Repair, tiny_mixtral: Path, tmp_path: Path
) -> None:
    assert repair(coarse, tiny_mixtral, "--steps", 2).code == 0
    assert "in GGUF, trained to predict as its original" in (tmp_path / "out" / "README.md").read_text()
    assert repair(coarse, tiny_mixtral, "--steps", 2, "--resume", "--dry-run").code == 0
    again = repair(coarse, tiny_mixtral, "--dry-run", name="again")
    assert again.json["output_bytes"] == coarse.stat().st_size, "also when the file was read before"
    other = repair(coarse, tiny_mixtral, "--steps", 3, "--resume", "--dry-run")
    assert other.code == 2
    assert "other settings" in other.stderr
