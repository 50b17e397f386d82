"""Dense families that are known by nothing but transformers' own class: upcycled, moefied, and back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_whole, logits, relative_error, tensors_of
from derived_dense import DERIVED_DENSE, ENCODERS
from sampling import sampled
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from moetool.runtime.modules.moefied import set_keep
from moetool.runtime.modules.neuron_experts import NeuronExperts
from moetool.runtime.synthesis import synthesize

FOUR = ("--experts", 4)
# Conv1D, a residual that the network adds, an activation with numbers, one that is spread over its layer, networks in
# some layers only and under other names on disk, joined matrices under names of their own.
STRUCTURES = ("gpt2", "bloom", "apertus", "xglm", "nemotron_h", "granitemoehybrid")
NATIVE = {"internlm3": "mixtral", "iquestcoder": "mixtral"}


@pytest.mark.parametrize("family", sampled(DERIVED_DENSE, STRUCTURES[::2]))
def test_upcycled_and_back(run_cli: Any, dense: Any, upcycle: Any, tokens: Tensor, tmp_path: Path, family: str) -> None:
    source = dense(family)
    expected = logits(source, tokens)
    for options in (FOUR, (*FOUR, "--shared", "half", "--target", "moetool")):
        made = upcycle(source, *options)
        assert made.told["target"] == (NATIVE.get(family, "moetool") if options == FOUR else "moetool")
        assert made.told["proof"]["relative_logit_error"] < 1e-5
        with torch.inference_mode():
            assert relative_error(load_whole(made.path)(input_ids=tokens).logits, expected) < 1e-5
    back = tmp_path / "dense"
    result = run_cli("export", upcycle(source, *FOUR).path, back, "--format", "dense", "--expert", 3)
    assert result.code == 0, result.stderr
    before, after = tensors_of(source), tensors_of(back)
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)


# A residual that the network adds, and a factor on what it gives.
@pytest.mark.parametrize("family", ["bloom", "falcon_h1"])
def test_a_shared_expert_on_the_base_is_the_whole_network(
    run_cli: Any, dense: Any, upcycle: Any, tokens: Tensor, tmp_path: Path, family: str
) -> None:
    source = dense(family)
    expected = logits(source, tokens)
    on_base = upcycle(source, *FOUR, "--method", "ders-lowrank", "--shared", "xft", "--shared-expert").path
    plain = upcycle(source, *FOUR, "--shared", "half", "--target", "moetool").path
    assert run_cli("decompose", plain, tmp_path / "split", "--shared-expert").code == 0
    for path in (on_base, tmp_path / "split"):
        model = load_whole(path)
        with torch.inference_mode():
            assert relative_error(model(input_ids=tokens).logits, expected) < 1e-5
            assert relative_error(synthesize(model)(input_ids=tokens).logits, expected) < 1e-5


@pytest.mark.parametrize(
    ("family", "says"),
    [("gpt2", "GPT2 have weights [in, out] (Conv1D)"), ("apertus", "Apertus have activations with numbers")],
)
def test_shared_experts_that_cannot_be_on_the_base(
    run_cli: Any, dense: Any, upcycle: Any, tmp_path: Path, family: str, says: str
) -> None:
    options = (*FOUR, "--method", "ders-sparse", "--shared", "half", "--shared-expert")
    result = run_cli("upcycle", dense(family), tmp_path / "out", *options, "--dry-run")
    assert result.code == 2
    assert (
        f"--shared-expert: the networks of {family.replace('gpt2', 'GPT2').replace('apertus', 'Apertus')} have"
        in result.stderr
    )
    assert says in result.stderr
    plain = upcycle(dense(family), *FOUR, "--shared", "half", "--target", "moetool").path
    result = run_cli("decompose", plain, tmp_path / "split", "--shared-expert")
    assert result.code == 3
    assert "The shared expert cannot be stored on the base of the routed ones" in result.stderr
    assert not (tmp_path / "split").exists()


def test_a_family_whose_layers_see_more_than_the_text(run_cli: Any, save_model: Any, tmp_path: Path) -> None:
    """CPM-Ant puts a prompt of its own before every text."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "dim_head": 8, "dim_ff": 48}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("cpmant", vocab_size=288, **sizes))
    result = run_cli("upcycle", save_model(model, tmp_path / "dense"), tmp_path / "out")
    assert result.code == 3
    assert "The layers of CpmAnt see more than the tokens of a text" in result.stderr


@pytest.mark.parametrize("family", sampled([*DERIVED_DENSE, *ENCODERS], [*STRUCTURES[1::2], "distilbert"]))
def test_moefied(dense: Any, moefy: Any, run_cli: Any, tokens: Tensor, family: str) -> None:
    source = dense(family)
    made = moefy(source, *FOUR, "--keep", 0.5)
    assert made.told["proof"]["relative_logit_error"] < 1e-5
    model = load_whole(made.path)
    assert any(isinstance(module, NeuronExperts) for module in model.modules())
    expected = logits(source, tokens)
    with torch.inference_mode():
        half = model(input_ids=tokens).logits
        set_keep(model, 1.0)
        assert relative_error(model(input_ids=tokens).logits, expected) < 1e-5
    assert 1e-4 < relative_error(half, expected) < 1.5
    told = run_cli("inspect", made.path, "--json").json
    assert {name: told["parameters"][name] for name in ("total", "active", "added")} == made.told["parameters"]
    assert told["hidden_size"] == 32
    assert run_cli("verify", made.path).code == 0


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("gpt2", "SIMoE takes linear layers with weights [out, in], and those of GPT2 are [in, out] (Conv1D)"),
        (
            "jamba",
            "SIMoE takes linear layers that are called, and Jamba computes with model.layers.0.mamba.dt_proj.weight",
        ),
    ],
)
def test_simoe_refuses_layers_before_the_job_begins(
    run_cli: Any, dense: Any, tmp_path: Path, family: str, says: str
) -> None:
    result = run_cli("upcycle", dense(family), tmp_path / "out", "--method", "simoe", "--dry-run")
    assert result.code == 3
    assert says in result.stderr
