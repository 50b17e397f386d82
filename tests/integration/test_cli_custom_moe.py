"""MoE models without gates and with biases, in the custom module: compressed, trained as deltas, un-merged."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import change_config, copy_of, load, logits, relative_error, tensors_of, weight_bytes
from sampling import sampled
from torch import Tensor

from moetool.runtime.modules.experts import SharedBaseExperts
from moetool.runtime.modules.shared_expert import SharedExpertOnBase
from moetool.runtime.synthesis import synthesize

FAMILIES = ["phi", "gpt_neox", "gpt_bigcode", "starcoder2", "falcon", "llama-mlp-bias"]
DROP = ("--method", "drop", "--drop", 0.4, "--experts", 4)
COMPRESS: dict[str, tuple[object, ...]] = {
    "d2moe": ("--method", "d2moe", "--ratio", 0.2),
    "d2moe, everything": ("--method", "d2moe", "--ratio", 0.3, "--merge", "regmean", "--prune-base", 0.2, "--trim", 1),
    "shared factors": ("--method", "d2moe", "--ratio", 0.3, "--share", "v", "--svd", "vanilla"),
    "hybrid": ("--method", "hybrid", "--ratio", 0.4, "--group-size", 16, "--refine", 2),
    "quantized": ("--method", "ders-quantize", "--bits", 4, "--group-size", 16, "--base-bits", 8),
    "sparse": ("--method", "ders-sparsify", "--drop", 0.5, "--select", "magnitude"),
}
LOW_RANK = ("--method", "ders-lowrank", "--rank", 2, "--experts", 4)
SPARSE = ("--method", "ders-sparse", "--drop", 0.9, "--experts", 4)
DIFFERENCES: dict[str, tuple[object, ...]] = {
    "low-rank": LOW_RANK,
    "sparse": SPARSE,
    "low-rank beside half": (*LOW_RANK, "--shared", "half"),
    "sparse beside xft": (*SPARSE, "--shared", "xft"),
}


@pytest.fixture
def moe(dense: Any, upcycle: Any) -> Any:
    """`moe("phi")`: experts that are not alike."""
    return lambda family, *options: upcycle(dense(family), *DROP, *options).path


def numbers(path: Path) -> int:
    return sum(tensor.numel() for tensor in tensors_of(path).values() if tensor.shape != (1, 1))


# -- compressed


@pytest.mark.parametrize("family", sampled(FAMILIES, ["phi", "gpt_bigcode", "llama-mlp-bias"]))
def test_a_full_decomposition_is_the_moe_model(
    run_cli: Any, moe: Any, tokens: Tensor, tmp_path: Path, family: str
) -> None:
    source = moe(family)
    assert run_cli("decompose", source, tmp_path / "split").code == 0
    expected = logits(source, tokens)
    assert relative_error(logits(tmp_path / "split", tokens), expected) < 1e-5
    assert run_cli("export", tmp_path / "split", tmp_path / "whole").code == 0
    assert tensors_of(tmp_path / "whole").keys() == tensors_of(source).keys()
    assert relative_error(logits(tmp_path / "whole", tokens), expected) < 1e-5


@pytest.mark.parametrize(
    ("family", "method"),
    sampled(
        product(("phi", "llama-mlp-bias"), COMPRESS),
        [
            *product(["phi"], ("d2moe, everything", "hybrid", "sparse")),
            *product(["llama-mlp-bias"], ("quantized", "shared factors")),
        ],
    ),
)
def test_compression(
    run_cli: Any, calibration: Any, moe: Any, tokens: Tensor, tmp_path: Path, family: str, method: str
) -> None:
    source, made, options = moe(family), tmp_path / "made", COMPRESS[method]
    text = () if "ders-sparsify" in options else calibration
    assert run_cli("compress", source, "--method", "d2moe", made, *text, *options).code == 0
    assert weight_bytes(made) < weight_bytes(source)
    assert run_cli("verify", made, "--against", source).code == 0
    expected = logits(made, tokens)
    assert relative_error(expected, logits(source, tokens)) < 0.6
    before, after = tensors_of(source), tensors_of(made)
    biases = [name for name in before if "bias" in name]
    assert biases
    assert all(after[name].equal(before[name]) for name in biases)
    summary = run_cli("inspect", made, "--json").json
    assert summary["parameters"]["total"] == run_cli("inspect", source, "--json").json["parameters"]["total"]
    assert run_cli("export", made, tmp_path / "whole").code == 0
    assert relative_error(logits(tmp_path / "whole", tokens), expected) < 1e-4


@pytest.mark.exhaustive
def test_a_killed_compression_goes_on_to_the_same_bytes(
    crash: Any, compress: Any, moe: Any, calibration: Any, tmp_path: Path
) -> None:
    source, options = moe("phi"), COMPRESS["d2moe"]
    arguments = ("compress", source, "--method", "d2moe", *calibration, *options)
    crash.goes_on(tmp_path / "out", arguments, 20, compress(source, *options).path)


def test_the_dense_model_as_base(run_cli: Any, dense: Any, moe: Any, tmp_path: Path) -> None:
    source = moe("phi")
    assert run_cli("decompose", source, tmp_path / "split", "--base", dense("phi")).code == 0
    stored, before = tensors_of(tmp_path / "split"), tensors_of(dense("phi"))
    for ours, theirs in (("up_proj", "fc1"), ("down_proj", "fc2")):
        base = stored[f"model.layers.1.mlp.experts.{ours}"]
        assert base.equal(before[f"model.layers.1.mlp.{theirs}.weight"][None])
    refused = run_cli("decompose", source, tmp_path / "no", "--base", dense("llama"))
    assert refused.code == 3
    assert "FFNs of gate, up, down" in refused.stderr


@pytest.mark.parametrize(("family", "options"), [("llama", ("--shared", "half")), ("phi", ("--shared", "half"))])
def test_the_dense_model_is_the_base_whatever_experts_are_scaled_by(
    run_cli: Any, dense: Any, upcycle: Any, tmp_path: Path, family: str, options: Any
) -> None:
    """Half of the output, in Granite-MoE, is half of every down matrix."""
    made = upcycle(dense(family), "--experts", 4, *options).path
    arguments = ("--method", "ders-quantize", "--bits", 2, "--group-size", 16, "--base", dense(family))
    assert run_cli("compress", made, "--method", "d2moe", tmp_path / "small", *arguments).code == 0
    errors = run_cli("verify", tmp_path / "small", "--against", made, "--json").json["relative_error"]
    assert all(error == 0 for roles in errors.values() for error in roles.values())


# -- differences to the dense model


@pytest.mark.parametrize(
    ("family", "options"),
    sampled(
        product(FAMILIES, DIFFERENCES),
        [
            *zip(FAMILIES, (*DIFFERENCES, *DIFFERENCES), strict=False),
        ],
    ),
)
def test_differences_begin_at_zero(
    run_cli: Any, dense: Any, upcycle: Any, tokens: Tensor, tmp_path: Path, family: str, options: str
) -> None:
    source = dense(family)
    made = upcycle(source, *DIFFERENCES[options])
    assert made.told["proof"]["relative_logit_error"] <= 1e-5
    assert relative_error(logits(made.path, tokens), logits(source, tokens)) < 1e-5
    assert made.told["parameters"]["total"] == numbers(made.path)
    assert made.told["parameters"]["added"] == numbers(made.path) - numbers(source)
    assert run_cli("export", made.path, tmp_path / "back", "--format", "dense", "--expert", 3).code == 0
    before, after = tensors_of(source), tensors_of(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(after[name].equal(before[name]) for name in before)


@pytest.mark.parametrize(
    ("family", "shared"),
    sampled(
        product(("llama", "phi", "phi3", "llama-mlp-bias"), ("half", "med", "xft")),
        [("llama", "half"), ("phi", "xft"), ("llama-mlp-bias", "med")],
    ),
)
def test_the_shared_expert_may_be_a_difference_too(
    run_cli: Any, dense: Any, upcycle: Any, tokens: Tensor, tmp_path: Path, family: str, shared: str
) -> None:
    """DeRS, Appendix A: then the dense FFN is stored once."""
    source, options = dense(family), (*LOW_RANK, "--shared", shared)
    made, apart = upcycle(source, *options, "--shared-expert"), upcycle(source, *options)
    assert made.told["target"] == (
        "granitemoeshared" if family in ("llama", "phi3") and shared == "half" else "moetool"
    )
    assert weight_bytes(made.path) < weight_bytes(apart.path)
    expected = logits(made.path, tokens)
    assert relative_error(expected, logits(apart.path, tokens)) < 1e-5
    model = load(made.path)
    assert sum(isinstance(module, SharedExpertOnBase) for module in model.modules()) == 3
    with torch.no_grad():  # the shared expert's own difference counts
        for module in model.modules():
            if isinstance(module, SharedBaseExperts):
                module.delta(4, "up").u.fill_(0.3)
    model.save_pretrained(tmp_path / "changed")
    changed = logits(tmp_path / "changed", tokens)
    assert relative_error(changed, expected) > 1e-3
    assert run_cli("export", tmp_path / "changed", tmp_path / "whole").code == 0
    assert relative_error(logits(tmp_path / "whole", tokens), changed) < 1e-5
    with torch.inference_mode():
        assert relative_error(synthesize(model)(input_ids=tokens, use_cache=False).logits, changed) < 1e-5
    with pytest.raises(RuntimeError, match="mismatch"):
        load(change_config(copy_of(made.path, tmp_path / "plain"), quantization_config=None))


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ((), 2, "there is none without --shared"),
        (("--shared", "half", "--target", "qwen2_moe"), 3, "Possible here: granitemoeshared, moetool"),
    ],
)
def test_shared_experts_that_cannot(
    run_cli: Any, dense: Any, tmp_path: Path, options: Any, code: int, says: str
) -> None:
    result = run_cli("upcycle", dense("llama"), tmp_path / "out", *LOW_RANK, "--shared-expert", *options)
    assert result.code == code
    assert says in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["phi", "llama"])
def test_tuning_trains_differences_biases_and_the_shared_one(
    run_cli: Any, dense: Any, upcycle: Any, tiny_text: Path, tokens: Tensor, tmp_path: Path, family: str
) -> None:
    made = upcycle(dense(family), *LOW_RANK, "--shared", "half", "--shared-expert")
    options = ("--data", tiny_text, "--steps", 3, "--sequence-length", 64, "--batch-size", 2, "--learning-rate", 1e-3)
    assert run_cli("tune", made.path, tmp_path / "tuned", *options).code == 0
    before, after = tensors_of(made.path), tensors_of(tmp_path / "tuned")
    assert before.keys() == after.keys()
    changed = {name for name in before if not after[name].equal(before[name])}
    assert any(".moetool.4.up.u" in name for name in changed)
    assert any(".moetool.0.down.u" in name for name in changed)
    assert any("experts.down_proj_bias" in name for name in changed) is (family == "phi")
    assert not any("attn" in name for name in changed)
    assert relative_error(logits(tmp_path / "tuned", tokens), logits(made.path, tokens)) > 1e-4


def test_its_experts_are_removed_by_number_alone(run_cli: Any, moe: Any, calibration: Any, tmp_path: Path) -> None:
    refused = run_cli("compress", moe("phi"), tmp_path / "out", "--method", "reap", "--experts", 3, *calibration)
    assert refused.code == 2
    assert "moetool's own module" in refused.stderr
    advised = refused.stderr.split(": ")[-1].rstrip(".\n").replace("NUMBERS", "1").split()
    assert run_cli("compress", moe("phi"), tmp_path / "out", *advised).code == 0
