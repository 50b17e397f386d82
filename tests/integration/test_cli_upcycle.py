"""`moetool upcycle`: dense models into MoE models that compute what the dense model computed."""

import re
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    change_config,
    change_tensors,
    config_of,
    contents,
    copy_of,
    ffn_inputs,
    load,
    load_whole,
    logits,
    relative_error,
    tensors_of,
    weight_bytes,
    weights,
)
from dense_families import DENSE_FAMILIES
from sampling import DENSE_STRUCTURES, sampled
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from moetool.calibration.windows import sample_windows
from moetool.convert.stage import sample_tokens
from moetool.upcycle.experts import Copies
from moetool.upcycle.targets import targets

CONFIGS = Path(__file__).parent.parent / "configs"
FOUR = ("--experts", 4)
LAYERS = 3

# By family of the source: the family that `--target auto` writes.
AUTOMATIC = {
    "llama": "mixtral",
    "llama-rope-scaled": "mixtral",
    "llama-wide-heads": "mixtral",
    "llama-attention-bias": "granitemoe",
    "llama-mlp-bias": "moetool",
    "mistral": "mixtral",
    "qwen2": "qwen2_moe",
    "qwen2-windows": "qwen2_moe",
    "qwen3": "qwen3_moe",
    "olmo2": "flex_olmo",
    "phi3": "mixtral",
    "phi3-longrope": "mixtral",
    "gemma": "granitemoe",
    "gemma2": "moetool",
    "gemma3": "moetool",
    "granite": "granitemoe",
    "gpt_neox": "moetool",
    "phi": "moetool",
    "gpt_bigcode": "moetool",
    "starcoder2": "moetool",
    "falcon": "moetool",
    "seed_oss": "qwen2_moe",
}
AUTOMATIC |= dict.fromkeys(("smollm3", "olmo", "olmo3", "cohere", "cohere2", "glm", "glm4"), "moetool")
AUTOMATIC |= dict.fromkeys(("exaone4", "ernie4_5", "hunyuan_v1_dense"), "moetool")
EXPERT = re.compile(r"\.experts\.(\d+\.|(gate_)?up_proj|down_proj)|block_sparse_moe\.(input|output)_linear")
ROUTER = re.compile(r"\.gate\.weight|\.router\.layer\.weight")


@pytest.fixture(scope="module")
def llama(dense: Any) -> Path:
    return dense("llama")


def routers(path: Path) -> dict[int, Tensor]:
    """The router of every MoE layer, `[experts, hidden]`."""
    found = {name: tensor for name, tensor in tensors_of(path).items() if ROUTER.search(name)}
    return {int(re.search(r"\.(\d+)\.", name)[1]): tensor.float() for name, tensor in found.items()}


# -- it computes what the dense model computed


def test_every_dense_family_is_tested() -> None:
    assert set(AUTOMATIC) == set(DENSE_FAMILIES)
    assert set(AUTOMATIC.values()) == set(targets()) - {"granitemoeshared"}


@pytest.mark.parametrize("family", sampled(AUTOMATIC, (*DENSE_STRUCTURES, "qwen2", "qwen3", "olmo2", "granite")))
def test_every_family(dense: Any, upcycle: Any, tokens: Tensor, family: str) -> None:
    source = dense(family)
    made = upcycle(source, *FOUR)
    assert made.told["target"] == AUTOMATIC[family]
    before, after = load(source), load_whole(made.path)
    native = AUTOMATIC[family] != "moetool"
    assert after.config.model_type == (AUTOMATIC[family] if native else before.config.model_type)
    with torch.inference_mode():
        expected = before(input_ids=tokens, use_cache=False).logits
        assert relative_error(after(input_ids=tokens, use_cache=False).logits, expected) < 1e-5
    generate = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    assert torch.equal(after.generate(tokens[:, :6], **generate), before.generate(tokens[:, :6], **generate))
    stored = {name: tensor.numel() for name, tensor in tensors_of(made.path).items()}
    routed = sum(size for name, size in stored.items() if EXPERT.search(name))
    total = sum(stored.values()) - (0 if native else LAYERS)  # placeholders of one number
    dense_total = sum(tensor.numel() for tensor in tensors_of(source).values())
    counts = {"total": total, "active": total - routed // 2, "added": total - dense_total}
    assert made.told["parameters"] == counts


# What llama becomes: options, the family that is written, and whether it computes what llama computes.
VARIANTS: list[tuple[str, str, bool]] = [
    ("--top-k 1", "mixtral", True),
    ("--top-k 4", "mixtral", True),
    ("--top-k 1 --target granitemoe", "granitemoe", True),
    ("--top-k 4 --target granitemoe", "granitemoe", True),
    ("--top-k 1 --target qwen2_moe", "qwen2_moe", True),
    ("--top-k 3 --target qwen2_moe", "qwen2_moe", True),
    ("--top-k 1 --target moetool", "moetool", True),
    ("--top-k 3 --target moetool", "moetool", True),
    ("--shared half", "granitemoeshared", True),
    ("--shared half --top-k 1 --target qwen2_moe", "qwen2_moe", True),
    ("--shared half --target moetool", "moetool", True),
    ("--shared half --layers every:2", "qwen2_moe", True),
    ("--shared xft", "moetool", True),
    ("--shared xft --top-k 1 --layers 2", "moetool", True),
    ("--shared med", "qwen2_moe", False),
    ("--shared med --target moetool --layers 0,2", "moetool", False),
    ("--layers 2,0,2", "qwen2_moe", True),
    ("--layers every:3 --target moetool", "moetool", True),
    ("--method fine-grained --granularity 2", "mixtral", True),
    ("--method fine-grained --granularity 3 --top-k 1 --target granitemoe", "granitemoe", True),
    ("--method fine-grained --granularity 4 --shared half", "granitemoeshared", True),
    ("--method fine-grained --granularity 4 --shared half --layers 1", "qwen2_moe", True),
    ("--method fine-grained --granularity 2 --shared xft", "moetool", True),
    ("--method drop --drop 0", "mixtral", True),
    ("--method drop --drop 0.01", "mixtral", True),  # of 48 channels none
    ("--method drop", "mixtral", False),
    ("--method drop --drop 1 --shared half", "granitemoeshared", False),
    ("--router-std 1", "mixtral", True),
]


@pytest.mark.parametrize(
    ("options", "target", "preserves"), sampled(VARIANTS, VARIANTS[::2]), ids=[row[0] for row in VARIANTS]
)
def test_what_a_llama_becomes(
    llama: Path, upcycle: Any, tokens: Tensor, options: str, target: str, preserves: bool
) -> None:
    made = upcycle(llama, *FOUR, *options.split())
    assert made.told["target"] == target
    assert made.told["proof"]["preserves"] is preserves
    model = load_whole(made.path)
    with torch.inference_mode():
        error = relative_error(model(input_ids=tokens, use_cache=False).logits, logits(llama, tokens))
    assert (error < 1e-5) is preserves
    assert error == pytest.approx(made.told["proof"]["relative_logit_error"], rel=0.5, abs=1e-6)


OTHERS = (
    ("gpt_neox", "--shared half --top-k 1"),
    ("phi", "--method fine-grained --granularity 4 --layers 1,2"),
    ("starcoder2", "--method fine-grained --granularity 2 --shared xft"),
    ("falcon", "--layers every:2"),
    ("gpt_bigcode", "--shared half --layers 0"),
    ("llama-mlp-bias", "--method fine-grained --granularity 2 --shared half"),
    ("phi3", "--layers 1"),
    ("phi3", "--target moetool --method fine-grained --granularity 2"),
    ("phi3", "--shared half"),
    ("gemma", "--shared half"),
    ("gemma2", "--method fine-grained --granularity 2 --layers 0"),
    ("qwen2", "--target granitemoe"),
    ("qwen2-windows", "--shared half --layers 0,2"),
    ("qwen3", "--layers 0,2"),
    ("olmo2", "--shared half"),
    ("granite", "--layers 2"),
    ("mistral", "--layers 1"),
)


@pytest.mark.parametrize(("family", "options"), sampled(OTHERS, OTHERS[::2]))
def test_other_families(dense: Any, upcycle: Any, tokens: Tensor, family: str, options: str) -> None:
    source = dense(family)
    model = load_whole(upcycle(source, *FOUR, *options.split()).path)
    with torch.inference_mode():
        assert relative_error(model(input_ids=tokens, use_cache=False).logits, logits(source, tokens)) < 1e-5


@pytest.mark.parametrize("target", ["qwen2_moe", "moetool"])
def test_med_moe_adds_the_shared_expert(llama: Path, upcycle: Any, tokens: Tensor, target: str) -> None:
    """(1 + Σ of the routed probabilities) · FFN, as Med-MoE has it."""
    made = upcycle(llama, *FOUR, "--shared", "med", "--target", target)
    rows, model = routers(made.path), load(llama)

    def scaled(layer: int) -> Callable[..., Tensor]:
        def hook(_: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            return output * (1 + (inputs[0] @ rows[layer].T).softmax(-1).topk(2).values.sum(-1, keepdim=True))

        return hook

    for layer, block in enumerate(model.model.layers):
        block.mlp.register_forward_hook(scaled(layer))
    with torch.inference_mode():
        expected = model(input_ids=tokens, use_cache=False).logits
    assert relative_error(logits(made.path, tokens), expected) < 1e-5


def test_drop_redraws_the_same_channels_of_all_three_matrices(llama: Path, upcycle: Any) -> None:
    made = tensors_of(upcycle(llama, *FOUR, "--method", "drop", "--drop", 0.25).path)
    before = tensors_of(llama)
    chosen = set()
    for layer in range(LAYERS):
        dense = {
            role: before[f"model.layers.{layer}.mlp.{role}_proj.weight"].clone() for role in ("gate", "up", "down")
        }
        dense["down"] = dense["down"].T
        for expert in range(4):
            own = f"model.layers.{layer}.block_sparse_moe.experts.{expert}."
            found = {"gate": made[own + "w1.weight"], "up": made[own + "w3.weight"], "down": made[own + "w2.weight"].T}
            changed = [(found[role] != dense[role]).any(1) for role in found]
            assert changed[0].sum() == 12
            assert changed[0].equal(changed[1])
            assert changed[0].equal(changed[2])
            chosen.add(tuple(changed[0].tolist()))
            for role, matrix in found.items():
                redrawn, dropped = matrix[changed[0]], dense[role][changed[0]]
                assert redrawn.std().item() == pytest.approx(dropped.std().item(), rel=0.25)
    assert len(chosen) == 4 * LAYERS, "every expert of every layer has channels of its own"


# -- evidence


def test_what_the_proof_measures(llama: Path, upcycle: Any) -> None:
    """Every number again from transformers: since nothing changes, routers see what the dense FFNs are given."""
    made = upcycle(llama, *FOUR)
    told, rows = made.told["proof"], routers(made.path)
    text = sample_tokens(AutoTokenizer.from_pretrained(llama), 288, 4, 64)
    assert told["tokens"] == text.numel() == 256
    model = load(llama)
    with torch.inference_mode(), ffn_inputs(model, "model.layers.{layer}.mlp") as inputs:
        expected = model(input_ids=text, use_cache=False).logits
        found = logits(made.path, text)
    for name, answer in (("dense", expected), ("mixture", found)):
        loss = F.cross_entropy(answer[:, :-1].flatten(0, 1), text[:, 1:].flatten()).item()
        assert told[f"loss_{name}"] == pytest.approx(loss, abs=1e-5)
    assert 0 < told["relative_logit_error"] < 1e-6
    shares, entropies = [], []
    for layer in range(LAYERS):
        probabilities = (inputs[layer][0] @ rows[layer].T).softmax(-1)
        shares.append(torch.bincount(probabilities.topk(2).indices.flatten(), minlength=4) / 512)
        entropies.append(torch.special.entr(probabilities).sum(-1).mean())
    assert told["least_expert_share"] == pytest.approx(torch.stack(shares).min().item(), abs=0.003)
    assert told["largest_expert_share"] == pytest.approx(torch.stack(shares).max().item(), abs=0.003)
    assert told["router_entropy"] == pytest.approx(torch.stack(entropies).mean().item(), abs=1e-3)
    assert 0 < told["least_expert_share"] < 0.2 < told["largest_expert_share"] < 0.5


def test_what_is_printed(run_cli: Any, llama: Path, tmp_path: Path) -> None:
    result = run_cli("upcycle", llama, tmp_path / "out", *FOUR)
    assert result.code == 0, result.stderr
    for line in (
        r"^family +mixtral$",
        r"^parameters +83,552, of which 55,904 per token$",
        r"^logits +differ from the dense model's by [1-9]\.\de-0[78] of their size on 256 tokens of text$",
        r"^loss +(\d\.\d{4}) \(dense\) → \1 nats per token$",
        r"^routing +each expert gets \d+\.\d% to \d+\.\d% of the tokens; router entropy 1\.\d+ nats$",
        r"^note +experts are 48 wide, no multiple of 256",
    ):
        assert re.search(line, result.stdout, re.M), result.stdout
    changed = run_cli("upcycle", llama, tmp_path / "drop", *FOUR, "--method", "drop")
    assert re.search(r"^logits +differ from .*\(the method changes the model\)$", changed.stdout, re.M), changed.stdout


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("llama-attention-bias", (), ["vLLM silently drops"]),
        ("mistral", (), ["sliding window of mixtral: beyond 8 tokens"]),
        ("qwen2", (), ["never renormalizes", "always has a shared expert"]),
        ("qwen3", ("--layers", 1), ["dense layers among those with experts"]),
        ("gpt_neox", (), ["import moetool"]),
        ("gemma", (), ["gelu_pytorch_tanh"]),
        ("olmo2", (), ["does not know flex_olmo"]),
    ],
)
def test_notes_on_other_engines(dense: Any, upcycle: Any, family: str, options: Any, words: list[str]) -> None:
    notes = upcycle(dense(family), *FOUR, *options).told["notes"]
    assert all(any(word in note for note in notes) for word in words), notes


def test_routers_are_fitted_to_a_text_that_is_given(upcycle: Any, llama: Path, calibration: Any) -> None:
    given, asked = upcycle(llama, *FOUR, *calibration), upcycle(llama, *FOUR, *calibration, "--center-router")
    assert weights(given.path) == weights(asked.path) != weights(upcycle(llama, *FOUR).path)


def test_the_proof_is_on_the_calibration_text(run_cli: Any, llama: Path, upcycle: Any, calibration: Any) -> None:
    without, given = upcycle(llama, *FOUR), upcycle(llama, *FOUR, *calibration, "--no-center-router")
    assert without.told["proof"]["loss_dense"] != given.told["proof"]["loss_dense"]
    assert weights(without.path) == weights(given.path)


def test_without_proof(llama: Path, upcycle: Any) -> None:
    made = upcycle(llama, *FOUR, "--no-proof")
    assert "proof" not in made.told
    assert weights(made.path) == weights(upcycle(llama, *FOUR).path)


def worse(by: float) -> Callable[..., Tensor]:
    """Copies, of which one in one layer is wrong by so much."""
    right = Copies.matrix

    def matrix(self: Copies, layer: int, expert: int, role: Any) -> Tensor:
        return right(self, layer, expert, role) * (1 + by * (layer == 1 and expert == 2 and role == "down"))

    return matrix


@pytest.mark.parametrize("target", ["mixtral", "moetool"])
@pytest.mark.parametrize("by", [1e-3, torch.nan])
def test_a_wrong_conversion_is_refused(
    run_cli: Any, llama: Path, upcycle: Any, tmp_path: Path, monkeypatch: Any, target: str, by: float
) -> None:
    arguments = ("upcycle", llama, tmp_path / "out", *FOUR, "--target", target, "--shard-size", "100kB")
    with monkeypatch.context() as patch:
        patch.setattr(Copies, "matrix", worse(by))
        result = run_cli(*arguments, "--json")
    assert result.code == 5, result.stderr
    assert result.stdout == ""
    assert not {"config.json", "model.safetensors.index.json"} & set(contents(tmp_path / "out"))
    for command in ("inspect", "verify"):
        assert run_cli(command, tmp_path / "out").code == 3
    with pytest.raises((OSError, ValueError)):
        load(tmp_path / "out")
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    if by == by:  # NaNs are not even written
        assert "it does not compute what this model computes" in last
        assert "1e-05" in last
        # The weights that lie there are no better for being asked again.
        assert run_cli(*arguments, "--resume").code == 5
        assert "config.json" not in contents(tmp_path / "out")
    assert run_cli(*arguments, "--overwrite").code == 0
    assert tensors_of(tmp_path / "out").keys() == tensors_of(upcycle(llama, *FOUR, "--target", target).path).keys()


@pytest.mark.parametrize("entry", [{"rms_norm_eps": 1e-2}, {"num_experts_per_tok": 1, "norm_topk_prob": False}])
def test_a_wrong_config_is_refused(
    run_cli: Any, llama: Path, tmp_path: Path, monkeypatch: Any, entry: dict[str, Any]
) -> None:
    known = dict(targets())
    right = known["qwen2_moe"]
    known["qwen2_moe"] = replace(right, entries=lambda dense, spec: {**right.entries(dense, spec), **entry})
    monkeypatch.setattr("moetool.upcycle.targets.targets", lambda: known)
    result = run_cli("upcycle", llama, tmp_path / "out", *FOUR, "--target", "qwen2_moe")
    assert result.code == 5, result.stderr
    assert "config.json" not in contents(tmp_path / "out")


# -- dtypes


@pytest.mark.parametrize(
    "options",
    ["", "--shared half", "--target moetool", "--target qwen2_moe", "--method fine-grained --granularity 4"],
)
def test_bf16_stays_bf16(dense: Any, upcycle: Any, tokens: Tensor, options: str) -> None:
    source = dense("llama", dtype=torch.bfloat16)
    made = upcycle(source, *FOUR, *options.split())
    assert {tensor.dtype for tensor in tensors_of(made.path).values()} == {torch.bfloat16}
    assert config_of(made.path)["dtype"] == "bfloat16"
    assert relative_error(logits(made.path, tokens), logits(source, tokens)) < 1e-5


@pytest.mark.parametrize("options", ["", "--target moetool", "--method fine-grained --granularity 3"])
def test_bf16_to_float32(dense: Any, upcycle: Any, tokens: Tensor, options: str) -> None:
    source = dense("llama", dtype=torch.bfloat16)
    made = upcycle(source, *FOUR, "--dtype", "float32", *options.split())
    assert {tensor.dtype for tensor in tensors_of(made.path).values()} == {torch.float32}
    assert config_of(made.path)["dtype"] == "float32"
    assert relative_error(logits(made.path, tokens), logits(source, tokens)) < 1e-5


def test_gemma_has_no_room_for_its_norms_in_bf16(
    run_cli: Any, dense: Any, upcycle: Any, tokens: Tensor, tmp_path: Path
) -> None:
    source = dense("gemma", dtype=torch.bfloat16)
    expected = logits(source, tokens)
    own = upcycle(source, *FOUR)
    assert own.told["target"] == "moetool"
    assert relative_error(logits(own.path, tokens), expected) < 1e-5
    result = run_cli("upcycle", source, tmp_path / "out", *FOUR, "--target", "granitemoe")
    assert result.code == 3
    assert "norms whose weights are kept less one in 16 bits (--dtype float32" in result.stderr
    assert not (tmp_path / "out").exists()
    wide = upcycle(source, *FOUR, "--dtype", "float32", "--target", "granitemoe")
    assert relative_error(load_whole(wide.path)(input_ids=tokens, use_cache=False).logits, expected) < 1e-5
    assert upcycle(source, *FOUR, "--dtype", "float32").told["target"] == "granitemoe"


# -- routers and seeds


def test_the_seed_decides_the_routers(run_cli: Any, llama: Path, upcycle: Any, tmp_path: Path) -> None:
    first = upcycle(llama, *FOUR)
    assert run_cli("upcycle", llama, tmp_path / "again", *FOUR, "--seed", 0).code == 0
    assert contents(tmp_path / "again") == contents(first.path)
    one, other = tensors_of(first.path), tensors_of(upcycle(llama, *FOUR, "--seed", 1).path)
    assert one.keys() == other.keys()
    assert {name for name in one if not one[name].equal(other[name])} == {name for name in one if ROUTER.search(name)}


@pytest.mark.parametrize("options", ["--method drop", "--target qwen2_moe", "--target qwen2_moe --shared half"])
def test_everything_random_is_from_the_seed(
    run_cli: Any, llama: Path, upcycle: Any, tmp_path: Path, options: str
) -> None:
    first = upcycle(llama, *FOUR, *options.split(), "--seed", 7)
    assert run_cli("upcycle", llama, tmp_path / "again", *FOUR, *options.split(), "--seed", 7).code == 0
    assert contents(tmp_path / "again") == contents(first.path)
    assert weights(first.path) != weights(upcycle(llama, *FOUR, *options.split()).path)


def test_routers_are_neither_zero_nor_one_hot(llama: Path, upcycle: Any) -> None:
    rows = torch.stack(list(routers(upcycle(llama, "--experts", 64, "--no-proof").path).values()))
    assert rows.std().item() == pytest.approx(1 / 96**0.5, rel=0.05)
    assert len(rows.view(-1, 32).unique(dim=0)) == LAYERS * 64
    wide = torch.stack(list(routers(upcycle(llama, "--experts", 64, "--no-proof", "--router-std", 2).path).values()))
    assert wide.std().item() == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize(
    ("family", "options", "ffn"),
    [
        ("llama", (), "model.layers.{layer}.mlp"),
        ("llama", ("--layers", "2", "--method", "fine-grained", "--granularity", 2), "model.layers.{layer}.mlp"),
        ("phi3", ("--target", "moetool"), "model.layers.{layer}.mlp"),
        ("olmo2", (), "model.layers.{layer}.mlp"),
        ("gpt_neox", (), "gpt_neox.layers.{layer}.mlp"),
        ("falcon", (), "transformer.h.{layer}.mlp"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." not in value else None,
)
def test_centred_routers_ignore_the_mean_input(
    dense: Any, upcycle: Any, calibration: Any, tokens: Tensor, family: str, options: Any, ffn: str
) -> None:
    source = dense(family)
    _, text, _, samples, _, length, *_ = calibration
    windows = sample_windows(
        str(text), AutoTokenizer.from_pretrained(source), samples=samples, sequence_length=length, seed=0
    )
    model = load(source)
    with torch.inference_mode(), ffn_inputs(model, ffn) as inputs:
        model(input_ids=windows, use_cache=False)
    made = upcycle(source, *FOUR, *options, "--center-router", *calibration)
    plain = upcycle(source, *FOUR, *options)
    centred, fresh = routers(made.path), routers(plain.path)
    assert centred.keys() == fresh.keys()
    for layer, rows in centred.items():
        seen = torch.cat(inputs[layer]).double()
        mean = seen.mean(0)

        def along(rows: Tensor, mean: Tensor = mean) -> float:
            return F.cosine_similarity(rows.double(), mean[None]).abs().max().item()

        assert along(rows) < 1e-5 < 1e-2 < along(fresh[layer])
        # On that text every expert's logits vary alike, whatever another's do, and as much as those of fresh rows did.
        logits_of = {kind: seen @ part.double().T for kind, part in (("fitted", rows), ("fresh", fresh[layer]))}
        unique = torch.arange(0, len(rows), max(1, len(rows) // FOUR[1]))
        covariance = torch.cov(logits_of["fitted"][:, unique].T, correction=0)
        variance = covariance.diagonal().mean()
        torch.testing.assert_close(covariance, variance * torch.eye(len(unique)).double(), rtol=0, atol=1e-4 * variance)
        direction = mean / mean.norm()
        flat = seen - torch.outer(seen @ direction, direction)
        before = (flat @ fresh[layer].double()[unique].T).var(0, correction=0).mean()
        torch.testing.assert_close(variance, before, rtol=1e-4, atol=0)
    assert relative_error(logits(made.path, tokens), logits(source, tokens)) < 1e-5


# -- killed jobs

SHARDS = ("--shard-size", "100kB")
JOBS: dict[str, tuple[str, ...]] = {
    "plain": SHARDS,
    "own module": ("--target", "moetool", "--method", "drop", *SHARDS),
    "centred": ("--center-router", *SHARDS),
}


@pytest.mark.parametrize(
    ("job", "tenths"),
    sampled(product(JOBS, (2, 5, 8)), [("own module", 8), ("centred", 5)]),
)
def test_a_killed_job_resumes_to_the_same_bytes(
    crash: Any, run_cli: Any, llama: Path, calibration: Any, tmp_path: Path, job: str, tenths: int
) -> None:
    arguments = ("upcycle", llama, *FOUR, *JOBS[job], *calibration)
    changes = crash.whole(tmp_path / "quiet", arguments)
    assert len(list((tmp_path / "quiet").glob("*.safetensors"))) > 1
    # Killed while tidying up, the job is done, and that is what the next one says.
    crash.goes_on(tmp_path / "out", arguments, changes * tenths // 10, tmp_path / "quiet")


def test_another_input_of_the_same_shape_is_not_the_same_job(crash: Any, dense: Any, tmp_path: Path) -> None:
    """Two fine-tunes of one model have the same headers; what was written of one is not finished with the other."""
    options = ("--method", "drop", *SHARDS, "--resume")
    first, second = dense("llama", 0), dense("llama", 1)
    assert crash(tmp_path / "out", ("upcycle", first, *options[:-1]), at=16)["code"] == -signal.SIGKILL
    told = crash(tmp_path / "out", ("upcycle", second, *options))
    assert told["code"] == 2, told["stderr"]
    assert "another input" in told["stderr"]
    assert crash(tmp_path / "out", ("upcycle", first, *options))["code"] == 0


def test_nothing_loads_before_it_is_proved(run_cli: Any, llama: Path, monkeypatch: Any, tmp_path: Path) -> None:
    def bug(*_: object) -> None:
        assert not (tmp_path / "out" / "config.json").exists()
        raise RuntimeError("a bug")

    monkeypatch.setattr("moetool.convert.proof.run", bug)
    assert run_cli("upcycle", llama, tmp_path / "out").code == 1
    assert not {"config.json", "moetool.json"} & set(contents(tmp_path / "out"))


@pytest.mark.parametrize(
    ("sent", "code", "job"),
    sampled(
        [(*signal, job) for signal in (("SIGTERM", 75), ("SIGINT", 130)) for job in ("plain", "centred")],
        [("SIGINT", 130, "plain"), ("SIGTERM", 75, "centred")],
    ),
)
def test_a_job_that_is_stopped(
    crash: Any, llama: Path, calibration: Any, tmp_path: Path, sent: str, code: int, job: str
) -> None:
    arguments = ("upcycle", llama, *FOUR, *JOBS[job], *calibration)
    told = crash(tmp_path / "out", arguments, at=12, sent=sent)
    assert told["code"] == code, told["stderr"]
    assert "--resume" in told["stderr"]
    assert "Traceback" not in told["stderr"]
    assert "config.json" not in contents(tmp_path / "out")
    other = crash(tmp_path / "out", (*arguments, "--seed", 1, "--resume"))
    assert other["code"] == 2
    assert "other settings" in other["stderr"]
    assert crash(tmp_path / "out", (*arguments, "--resume"))["code"] == 0
    assert crash(tmp_path / "quiet", arguments)["code"] == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "quiet")


def test_several_weight_files(llama: Path, upcycle: Any, tokens: Tensor) -> None:
    whole, cut = upcycle(llama, *FOUR), upcycle(llama, *FOUR, *SHARDS)
    assert (cut.path / "model.safetensors.index.json").exists()
    assert len(list(cut.path.glob("*.safetensors"))) == 4
    one, other = tensors_of(whole.path), tensors_of(cut.path)
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)
    assert relative_error(load_whole(cut.path)(input_ids=tokens, use_cache=False).logits, logits(llama, tokens)) < 1e-5


# -- what comes next

NATIVE = {
    "mixtral": ("llama", ()),
    "granitemoe": ("llama-attention-bias", ()),
    "granitemoeshared": ("llama", ("--shared", "half")),
    "qwen2_moe": ("qwen2", ("--layers", "0,2")),
    "qwen3_moe": ("qwen3", ()),
    "flex_olmo": ("olmo2", ()),
}


@pytest.mark.parametrize("target", NATIVE)
def test_compress_takes_it(run_cli: Any, dense: Any, upcycle: Any, tokens: Tensor, tmp_path: Path, target: str) -> None:
    """Equal experts have no differences, whatever these are stored in."""
    family, options = NATIVE[target]
    source = dense(family)
    made = upcycle(source, *FOUR, *options)
    assert made.told["target"] == target
    assert run_cli("verify", made.path).code == 0
    quantized = ("--method", "ders-quantize", "--bits", 2, "--group-size", 16)
    result = run_cli("compress", made.path, "--method", "d2moe", tmp_path / "out", *quantized, "--json")
    assert result.code == 0, result.stderr
    assert weight_bytes(tmp_path / "out") < 0.8 * weight_bytes(made.path)
    assert relative_error(logits(tmp_path / "out", tokens), logits(source, tokens)) < 1e-5


@pytest.mark.parametrize("options", [(), ("--shared", "half")])
def test_compress_takes_it_with_text(
    run_cli: Any, llama: Path, upcycle: Any, calibration: Any, tokens: Tensor, tmp_path: Path, options: Any
) -> None:
    made = upcycle(llama, *FOUR, *options)
    result = run_cli("compress", made.path, "--method", "d2moe", tmp_path / "out", "--ratio", 0.3, *calibration)
    assert result.code == 0, result.stderr
    assert relative_error(logits(tmp_path / "out", tokens), logits(llama, tokens)) < 1e-4


def test_layers_that_predict_further_tokens_stay_as_they_are(dense: Any, upcycle: Any, tmp_path: Path) -> None:
    """Of Qwen3.5 they lie in a list of their own, which transformers passes over; layers beyond the model's do not."""
    further = {"mtp.layers.0.mlp.up_proj.weight": torch.ones(4, 4), "mtp.norm.weight": torch.ones(4)}
    source = change_tensors(copy_of(dense("qwen3_5_text"), tmp_path / "model"), lambda tensors: tensors.update(further))
    kept = tensors_of(upcycle(source, "--experts", 2, "--top-k", 1).path)
    assert all(kept[name].equal(tensor) for name, tensor in further.items())


def test_without_moetool_an_own_module_does_not_load(dense: Any, upcycle: Any, tmp_path: Path) -> None:
    """A placeholder of one number stands where the dense network's matrix was."""
    path = copy_of(upcycle(dense("gpt_neox"), *FOUR).path, tmp_path / "plain")
    change_config(path, quantization_config=None)
    with pytest.raises(RuntimeError, match="mismatch"):
        load(path)


# -- costs


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [("mistral-7b", 46_702_792_704, 12_879_925_248), ("llama-3-8b", 47_491_321_856, 13_668_454_400)],
)
def test_real_models_from_their_config_alone(
    run_cli: Any, tmp_path: Path, name: str, parameters: int, active: int
) -> None:
    source = tmp_path / name
    source.mkdir()
    (source / "config.json").write_bytes((CONFIGS / f"{name}.json").read_bytes())
    arguments = ("upcycle", source, tmp_path / "out", "--experts", 8, "--top-k", 2)
    plan = run_cli(*arguments, "--dry-run", "--json").json
    assert (plan["parameters"], plan["active_parameters"]) == (parameters, active)
    assert (plan["target"], plan["experts"], plan["top_k"], plan["moe_layers"]) == ("mixtral", 8, 2, 32)
    assert plan["output_bytes"] == pytest.approx(2 * parameters, rel=1e-5)
    assert plan["headers"] == "config.json alone"
    layer = 4 * parameters / 32 / 8
    assert layer < plan["peak_memory_bytes"] < 20 * layer
    printed = run_cli(*arguments, "--dry-run").stdout
    assert f"{parameters:,}" in printed
    assert "Nothing was written" in printed
    refused = run_cli(*arguments)
    assert refused.code == 3
    assert "has no safetensors weights" in refused.stderr
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", ""),
        ("llama", "--shard-size 100kB"),
        ("llama", "--shared half --layers 1,2"),
        ("llama", "--method fine-grained --granularity 2"),
        ("llama-wide-heads", ""),
        ("gemma", ""),
        ("gpt_neox", ""),
        ("phi3", "--layers 1"),
        ("phi3", "--target moetool"),
        ("qwen2", ""),
    ],
)
def test_a_dry_run_knows_the_bytes(
    run_cli: Any, dense: Any, upcycle: Any, tmp_path: Path, family: str, options: str
) -> None:
    source = dense(family)
    made = upcycle(source, *FOUR, *options.split())
    arguments = ("upcycle", source, tmp_path / "out", *FOUR, *options.split(), "--dry-run", "--json")
    plan = run_cli(*arguments).json
    assert plan["input_bytes"] == weight_bytes(source)
    assert plan["output_bytes"] == weight_bytes(made.path) == made.told["bytes_after"]
    assert plan["disk_bytes"] == plan["output_bytes"] + plan["scratch_bytes"]
    counts = {"total": "parameters", "active": "active_parameters", "added": "added_parameters"}
    assert {name: plan[key] for name, key in counts.items()} == made.told["parameters"]
    imagined = tmp_path / "config-only"
    imagined.mkdir()
    (imagined / "config.json").write_bytes((source / "config.json").read_bytes())
    told = run_cli("upcycle", imagined, *arguments[2:]).json
    assert told["output_bytes"] == plan["output_bytes"]
    assert not (tmp_path / "out").exists()


# -- what cannot be used


@pytest.fixture
def refused(run_cli: Any, tmp_path: Path) -> Callable[..., str]:
    """`refused(code, source, *options)`: `upcycle` ends with that code, and there is no output; what it says."""

    def run(code: int, source: Path, *options: object) -> str:
        before = contents(tmp_path)
        for more in ((), ("--json",)):
            result = run_cli("upcycle", source, tmp_path / "out", *options, *more)
            assert result.code == code, (result.code, result.stderr)
            assert "Traceback" not in result.stderr
            assert result.stdout == ""
            assert not (tmp_path / "out").exists()
        assert contents(tmp_path) == before
        last = result.stderr.splitlines()[-1]
        assert last.lower().startswith("error: ")
        return last

    return run


OPTIONS: dict[str, tuple[int, str, list[str]]] = {
    "more per token than there are": (2, "--top-k 9", ["--top-k 9", "only 8 experts"]),
    "more than asked for": (2, "--experts 4 --top-k 5", ["--top-k 5", "only 4"]),
    "none per token": (2, "--top-k 0", ["--top-k 0", "1"]),
    "one expert": (2, "--experts 1", ["--experts 1", "2"]),
    "no number of experts": (2, "--experts many", ["--experts"]),
    "a layer too far": (2, "--layers 0,3", ["--layers 0,3", "layers 0 to 2"]),
    "every so many": (2, "--layers every:4", ["--layers every:4", "only 3 layers"]),
    "every none": (2, "--layers every:0", ["every:0", "every:N"]),
    "every word": (2, "--layers every:other", ["every:other", "every:N"]),
    "no layers": (2, "--layers some", ["--layers some", "0,4,8"]),
    "no digit": (2, "--layers ²", ["--layers ²", "0,4,8"]),
    "a gap": (2, "--layers 0,,2", ["--layers 0,,2", "0,4,8"]),
    "before the first": (2, "--layers=-1", ["--layers -1"]),
    "pieces that do not fit": (2, "--method fine-grained --granularity 5", ["5", "48", "2, 3, 4, 6"]),
    "more pieces than channels": (2, "--method fine-grained --granularity 100", ["12, 16, 24, 48"]),
    "no pieces": (2, "--method fine-grained --granularity 0", ["--granularity 0"]),
    "more than everything": (2, "--method drop --drop 1.5", ["--drop 1.5", "1"]),
    "another method's option": (2, "--drop 0.5", ["--drop"]),
    "no such method": (2, "--method magic", ["magic", "vanilla", "branch-train-mix"]),
    "no such family": (2, "--target mixtrall", ["--target mixtrall", "mixtral", "moetool"]),
    "no such sharing": (2, "--shared quarter", ["quarter", "half"]),
    "no such dtype": (2, "--dtype float16", ["float16", "float32"]),
    "no such text": (3, "--center-router --calibration ./nope.txt", ["nope.txt"]),
    "no such text for the proof": (3, "--calibration ./nope.txt", ["nope.txt"]),
    "flat routers": (2, "--router-std 0", ["--router-std"]),
    "too little disk": (4, "--disk 1KB", ["disk", "1.0 kB"]),
    "too little memory": (4, "--memory 1MB", ["memory", "1.0 MB"]),
    "no shared expert": (3, "--target mixtral --shared half", ["half", "granitemoeshared, qwen2_moe, moetool"]),
    "no dense layers": (3, "--target granitemoe --layers 1", ["granitemoe", "dense layers", "qwen2_moe, moetool"]),
    "norms that are not there": (3, "--target qwen3_moe", ["norms on every head", "Possible here: mixtral"]),
    "nothing else has it": (3, "--target qwen2_moe --shared xft", ["XFT", "Possible here: moetool."]),
}  # fmt: skip


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_bad_option(refused: Any, llama: Path, kind: str) -> None:
    code, options, words = OPTIONS[kind]
    message = refused(code, llama, *options.split())
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("family", "target", "words"),
    [
        ("llama-attention-bias", "mixtral", ["biases on all attention projections", "granitemoe, moetool"]),
        ("qwen2", "mixtral", ["biases on queries, keys and values", "qwen2_moe"]),
        ("llama-mlp-bias", "mixtral", ["biases in the feed-forward network", "Possible here: moetool."]),
        ("gemma2", "granitemoe", ["a decoder layer that no MoE family shares", "Possible here: moetool."]),
        ("qwen2-windows", "mixtral", ["sliding windows in some layers only", "qwen2_moe"]),
        ("granite", "mixtral", ["multipliers", "granitemoe"]),
        ("gpt_neox", "mixtral", ["without a gate", "Possible here: moetool."]),
    ],
)
def test_a_family_that_cannot_express_it(refused: Any, dense: Any, family: str, target: str, words: list[str]) -> None:
    message = refused(3, dense(family), "--target", target)
    assert f"cannot be expressed as {target}" in message
    assert all(word in message for word in words), message


def test_odd_pieces_in_bf16(refused: Any, dense: Any) -> None:
    source = dense("llama", dtype=torch.bfloat16)
    message = refused(2, source, "--method", "fine-grained", "--granularity", 3)
    assert all(word in message for word in ("--granularity 3", "bfloat16", "power of two", "--dtype float32")), message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "lama"}, ["Unknown model family 'lama'", "Did you mean llama"]),
        ({"model_type": None}, ["config.json names no model_type"]),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["quantized", "gptq"]),
        ({"model_type": "camembert", "architectures": ["CamembertForMaskedLM"]}, ["only encodes", "causal language"]),
        ({"num_hidden_layers": 5}, ["Every tensor of model.layers.4 is missing", "promises 5 layers"]),
        ({"num_hidden_layers": 2}, ["has a tensor model.layers.2.", "config.json does not know"]),
        ({"intermediate_size": 64}, ["has shape [32, 48]", "config.json promises [32, 64]"]),
        ({"num_attention_heads": "many"}, ["num_attention_heads is 'many'", "valid integer"]),
    ],
)
def test_a_config_that_cannot_be_used(
    refused: Any, llama: Path, tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    source = change_config(copy_of(llama, tmp_path / "bad"), **changes)
    message = refused(3, source)
    assert all(word in message for word in words), message


def test_an_encoder(refused: Any, save_model: Any, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    bert = BertForMaskedLM(BertConfig(vocab_size=288, hidden_size=32, **sizes))
    message = refused(3, save_model(bert, tmp_path / "bert"))
    assert "(bert) only encodes" in message
    assert "decoder" in message


def test_what_is_an_moe_model_already(refused: Any, tiny_mixtral: Path, dense: Any, upcycle: Any) -> None:
    assert "(mixtral) is an MoE model already: num_local_experts is 4" in refused(3, tiny_mixtral)
    assert "an MoE model already: moetool upcycled it" in refused(3, upcycle(dense("gpt_neox"), *FOUR).path)


def test_an_output_that_is_there(run_cli: Any, llama: Path, upcycle: Any, tmp_path: Path) -> None:
    output = copy_of(upcycle(llama, *FOUR).path, tmp_path / "out")
    before = contents(output)
    result = run_cli("upcycle", llama, output, *FOUR, "--seed", 1)
    assert result.code == 2
    assert "--overwrite" in result.stderr
    assert contents(output) == before
    assert run_cli("upcycle", llama, output, *FOUR, "--overwrite", "--resume").code == 2
    nowhere = ("--center-router", "--calibration", "./nowhere.txt")
    assert run_cli("upcycle", llama, output, *FOUR, "--overwrite", *nowhere).code == 3
    assert contents(output) == before, "nothing is thrown away for a command that cannot begin"
    assert run_cli("upcycle", llama, output, *FOUR, "--seed", 1, "--overwrite").code == 0
    assert weights(output) != weights(upcycle(llama, *FOUR).path)
    inside = run_cli("upcycle", llama, llama / "out", *FOUR)
    assert inside.code == 2
    assert not (llama / "out").exists()


def test_nobody_elses_directory_is_deleted(run_cli: Any, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert run_cli("upcycle", llama, tmp_path, *FOUR).code == 2
    assert run_cli("upcycle", llama, tmp_path, *FOUR, "--overwrite").code == 2
    assert contents(tmp_path) == {"mine.txt": b"mine"}
