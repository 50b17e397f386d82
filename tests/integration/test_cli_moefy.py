"""`moetool moefy`: dense models that compute a part of their feed-forward networks per token."""

import shutil
import signal
from collections.abc import Callable
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
    load,
    load_whole,
    logits,
    python,
    relative_error,
    tensors_of,
    weight_bytes,
    weights,
)
from dense_families import DENSE_FAMILIES, MOEFY_FAMILIES
from sampling import DENSE_STRUCTURES, sampled
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForTokenClassification, AutoTokenizer

from moetool.architectures.dense import find_dense_architecture
from moetool.calibration.activations import ActivationFile
from moetool.calibration.windows import load_tokenizer, sample_windows
from moetool.errors import UsageError
from moetool.moefy.clusters import Moefied
from moetool.quiet import quiet
from moetool.runtime.modules.led_neurons import LedNeurons
from moetool.runtime.modules.moefied import set_keep
from moetool.runtime.modules.neuron_experts import NeuronExperts

FOUR = ("--experts", 4, "--keep", 0.5)
LED = ("--keep", 0.5)  # by a projection, of all neurons
LAYERS = 3


@pytest.fixture(scope="module")
def llama(dense: Any) -> Path:
    return dense("llama")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, tiny_text: Path) -> tuple[Path, Path]:
    """Two that have little in common."""
    folder = tmp_path_factory.mktemp("texts")
    words, numbers = folder / "words.txt", folder / "numbers.txt"
    words.write_text(tiny_text.read_text()[:6000])
    numbers.write_text(" ".join(str(n * n) for n in range(1000)))
    return words, numbers


def networks(model: Any) -> list[NeuronExperts]:
    return [module for module in model.modules() if isinstance(module, NeuronExperts)]


def with_keep(path: Path, keep: float) -> Any:
    model = load(path)
    set_keep(model, keep)
    return model


def masked_reference(model: Any) -> None:
    """Let every network compute all activations, and put those of experts that are not chosen to their centre."""

    def forward(network: NeuronExperts) -> Callable[[Tensor], Tensor]:
        def run(hidden: Tensor) -> Tensor:
            rows = hidden.reshape(-1, network.hidden)
            activations = network.activation(rows, [(0, network.intermediate)])
            used = torch.zeros(len(rows), network.num_experts).scatter(1, network.select(rows), 1.0)
            mixed = torch.where(
                used.repeat_interleave(network.size, 1).bool(), activations, network.centre.expand_as(activations)
            )
            down = network.linear("down")
            return F.linear(mixed, down.weight, down.bias).view_as(hidden)

        return run

    for network in networks(model):
        network.forward = forward(network)


# -- with all experts it computes what the dense model computed, with fewer what the masked sum is


@pytest.mark.parametrize("options", [FOUR, LED])
@pytest.mark.parametrize(
    "family", sampled([*DENSE_FAMILIES, *MOEFY_FAMILIES], [*DENSE_STRUCTURES[1::2], *MOEFY_FAMILIES])
)
def test_every_family(
    run_cli: Any, dense: Any, moefy: Any, calibration: Any, tokens: Tensor, tmp_path: Path, family: str, options: Any
) -> None:
    source = dense(family)
    made = moefy(source, *options)
    assert made.told["proof"]["relative_logit_error"] < 1e-5
    assert made.told["proof"]["preserves"] is True
    model = load_whole(made.path)
    assert len(networks(model)) == LAYERS
    count = 4 if options == FOUR else networks(model)[0].intermediate
    assert all((network.num_experts, network.kept) == (count, count // 2) for network in networks(model))
    assert all(isinstance(network, LedNeurons) == (options == LED) for network in networks(model))
    with torch.inference_mode():
        expected, half = logits(source, tokens), model(input_ids=tokens).logits
        set_keep(model, 1.0)
        assert relative_error(model(input_ids=tokens).logits, expected) < 1e-5
        set_keep(model, 0.5)
        for impossible in (True, "0.25", None, 0, 1.5):
            with pytest.raises(UsageError, match=f"keep is {impossible!r}: it must be"):
                set_keep(model, impossible)
        assert model(input_ids=tokens).logits.equal(half)
        masked_reference(model)
        assert relative_error(model(input_ids=tokens).logits, half) < 1e-5
    assert 1e-3 < relative_error(half, expected) < 1
    told = run_cli("inspect", made.path, "--json").json
    counts = {name: told["parameters"][name] for name in ("total", "active", "added")}
    assert counts == made.told["parameters"]
    assert (told["experts"], told["top_k"], told["moe_layers"], told["hidden_size"]) == (count, count // 2, LAYERS, 32)
    assert told["intermediate_size"] == count * networks(model)[0].size
    plan = run_cli("moefy", source, tmp_path / "nowhere", *options, *calibration, "--dry-run", "--json").json
    assert plan["output_bytes"] == weight_bytes(made.path) == made.told["bytes_after"]
    assert [plan[name] for name in ("parameters", "active_parameters", "added_parameters")] == list(counts.values())
    assert run_cli("verify", made.path).code == 0


@pytest.mark.parametrize("options", [FOUR, LED])
@pytest.mark.parametrize(
    "family", sampled(("llama", "gpt_neox", "opt", "falcon", "gpt_bigcode"), ("llama", "opt", "gpt_bigcode"))
)
def test_generation_takes_the_path_of_few_tokens(
    dense: Any, moefy: Any, tokens: Tensor, family: str, options: Any
) -> None:
    """Cached, a token at a time: the masked sum again, and with all experts the dense model's own words."""
    made = moefy(dense(family), *options)
    words = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    scored = {"output_logits": True, "return_dict_in_generate": True, **words}
    model, reference = load(made.path), load(made.path)
    masked_reference(reference)
    found, expected = (m.generate(tokens[:1, :6], **scored) for m in (model, reference))
    assert found.sequences.equal(expected.sequences)
    assert relative_error(torch.stack(found.logits), torch.stack(expected.logits)) < 1e-5
    set_keep(model, 1.0)
    plain = load(dense(family)).generate(tokens[:, :6], **words)
    assert model.generate(tokens[:, :6], **words).equal(plain)


def test_more_experts_come_closer(llama: Path, moefy: Any, tokens: Tensor) -> None:
    path, expected = moefy(llama, *FOUR).path, logits(llama, tokens)
    with torch.inference_mode():
        errors = [
            relative_error(with_keep(path, keep)(input_ids=tokens).logits, expected) for keep in (0.25, 0.5, 0.75, 1.0)
        ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-5


def test_the_mean_output_is_kept(llama: Path, moefy: Any, tiny_text: Path) -> None:
    """Of the network that was calibrated on the text, with any fixed experts; of the first layer, whose input is the
    dense model's."""
    windows = sample_windows(str(tiny_text), load_tokenizer(llama), samples=16, sequence_length=32, seed=0)
    means = {}
    for name, path in {
        "dense": llama,
        "g": moefy(llama, *FOUR, "--selector", "random").path,
        "plain": moefy(llama, *FOUR, "--selector", "random", "--method", "moefication").path,
    }.items():
        model, seen = load(path), []
        model.model.layers[0].mlp.register_forward_hook(lambda _, inputs, output, s=seen: s.append(output))
        with torch.inference_mode():
            model(input_ids=windows)
        means[name] = seen[0].double().mean((0, 1))
    assert relative_error(means["g"], means["dense"]) < 1e-5
    assert relative_error(means["plain"], means["dense"]) > 0.05


def test_what_is_told(llama: Path, moefy: Any, tiny_text: Path) -> None:
    """Losses of the proof again, from transformers; shares of energy within what is possible."""
    made = moefy(llama, *FOUR)
    told, activations = made.told["proof"], made.told["activations"]
    text = sample_windows(str(tiny_text), load_tokenizer(llama), samples=4, sequence_length=64, seed=0)
    for path, name in ((llama, "loss_dense"), (made.path, "loss_kept")):
        loss = F.cross_entropy(logits(path, text)[:, :-1].flatten(0, 1), text[:, 1:].flatten()).item()
        assert told[name] == pytest.approx(loss, abs=1e-5)
    assert told["tokens"] == 256
    assert told["loss_mixture"] == pytest.approx(told["loss_dense"], abs=2e-6)
    assert told["loss_kept"] != pytest.approx(told["loss_dense"], abs=1e-4)
    assert 0.5 < activations["captured"] < activations["captured_by_oracle"] < 1
    assert 0.5 < activations["selector_accuracy"] < 1
    assert 0 < activations["soft_sparsity_centred"] < 1
    without = moefy(llama, *FOUR, "--no-proof").told
    assert "proof" not in without
    assert without["activations"] == activations


def test_energy_kept_is_that_of_the_oracle_or_less(llama: Path, moefy: Any) -> None:
    kept = {
        name: moefy(llama, *FOUR, *options).told["activations"].get("captured")
        for name, options in {"mlp": (), "random": ("--selector", "random"), "oracle": ("--selector", "oracle")}.items()
    }
    assert kept["oracle"] is None
    assert kept["random"] == pytest.approx(0.5, abs=0.12)
    assert kept["random"] < kept["mlp"]


# -- methods, selectors, baselines, layers

VARIANTS = [
    "--selector oracle",
    "--selector random",
    "--baseline snip",
    "--method moefication",
    "--method moefication --selector oracle",
    "--method moefication --baseline snip",
    "--layers 0,2",
    "--layers 1 --baseline snip",
    "--layers every:2 --selector random",
    "--dtype float32",
    "--shard-size 100kB",
]


@pytest.mark.parametrize(
    ("family", "options"),
    sampled(
        product(("llama", "bert"), VARIANTS),
        [
            *product(["llama"], VARIANTS[1:6]),
            *product(["bert"], ("--selector oracle", "--layers every:2 --selector random")),
        ],
    ),
)
def test_every_selector_method_and_baseline(
    run_cli: Any, dense: Any, moefy: Any, calibration: Any, tokens: Tensor, tmp_path: Path, options: str, family: str
) -> None:
    source = dense(family)
    made = moefy(source, *FOUR, *options.split())
    assert made.told["proof"]["relative_logit_error"] < 1e-5
    model, expected = load_whole(made.path), logits(source, tokens)
    entry = config_of(made.path)["quantization_config"]["neuron_experts"]
    layers = {"0,2": [0, 2], "1": [1], "every:2": entry["layers"]}
    listed = next((found for name, found in layers.items() if f"--layers {name}" in options), [0, 1, 2])
    assert entry["layers"] == listed
    assert len(networks(model)) == len(listed)
    assert all(bool(network.centre.any()) is ("moefication" not in options) for network in networks(model))
    with torch.inference_mode():
        half = model(input_ids=tokens).logits
        set_keep(model, 1.0)
        assert relative_error(model(input_ids=tokens).logits, expected) < 1e-5
    assert relative_error(half, expected) > 1e-3
    plan = run_cli("moefy", source, tmp_path / "out", *FOUR, *options.split(), *calibration, "--dry-run", "--json").json
    assert plan["output_bytes"] == weight_bytes(made.path)
    assert plan["moe_layers"] == len(listed)
    told = run_cli("inspect", made.path, "--json").json["parameters"]
    assert {name: told[name] for name in ("total", "active", "added")} == made.told["parameters"]


@pytest.mark.parametrize("family", sampled(["llama", "gpt_neox", "opt"], ["llama"]))
def test_the_oracle_does_better_than_the_selector_and_that_than_chance(
    dense: Any, moefy: Any, tokens: Tensor, family: str
) -> None:
    """The best choice loses less than a learnt one, that less than chance, on the whole of the first network."""
    errors = {}
    source = load(dense(family))
    path = find_dense_architecture(source.config.to_dict())
    last = path.weight_name(0, "down").removesuffix(".weight")
    seen: list[Tensor] = []
    source.get_submodule(last).register_forward_hook(lambda _, inputs, output: seen.append(output.reshape(-1, 32)))
    source(input_ids=tokens)
    for selector in ("oracle", "mlp", "random"):
        model = load(moefy(dense(family), *FOUR, "--selector", selector, "--as-published").path)
        given: list[Tensor] = []
        network = networks(model)[0]
        network.register_forward_hook(lambda _, inputs, output, g=given: g.append(output.reshape(-1, 32)))
        with torch.inference_mode():
            model(input_ids=tokens)
        errors[selector] = relative_error(given[0], seen[0])
    assert errors["oracle"] < errors["mlp"] < errors["random"]


def test_snip_keeps_the_neurons_that_matter_most(llama: Path, moefy: Any, tiny_text: Path) -> None:
    """Of every layer the first half of what the whole model's gradients say, single neurons and not experts."""
    windows = sample_windows(str(tiny_text), load_tokenizer(llama), samples=16, sequence_length=32, seed=0)
    model, kept = load(llama), []
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(
            lambda _, inputs: (inputs[0].retain_grad(), kept.append(inputs[0]))[1]
        )
    logits_of = model(input_ids=windows).logits
    for row, text in zip(logits_of, windows, strict=True):
        F.cross_entropy(row[:-1], text[1:]).backward(retain_graph=True)
    before, made = tensors_of(llama), tensors_of(moefy(llama, *FOUR, "--baseline", "snip").path)
    for layer, activations in enumerate(kept):
        saliency = (activations * activations.grad).detach().sum((0, 1)).abs()
        order = saliency.argsort(descending=True)
        name = f"model.layers.{layer}.mlp."
        first = made[f"{name}ffn.down_proj.weight"][:, :24]
        expected = before[f"{name}down_proj.weight"][:, order[:24].sort().values]
        matches = (first[:, :, None] == expected[:, None]).all(0)
        assert matches.any(0).sum() >= 23, "of equal saliency, rounding may decide"
        assert made[f"{name}order"].equal(torch.arange(4))


def test_random_experts_are_drawn_by_seed_and_layer(llama: Path, moefy: Any) -> None:
    orders = [
        [tensor.tolist() for name, tensor in sorted(tensors_of(path).items()) if name.endswith("mlp.order")]
        for path in (
            moefy(llama, "--experts", 8, "--selector", "random", "--seed", seed).path for seed in (0, 1)
        )
    ]  # fmt: skip
    assert all(sorted(order) == list(range(8)) for made in orders for order in made)
    assert orders[0] != orders[1]
    assert len({tuple(order) for order in orders[0]}) == LAYERS


@pytest.mark.parametrize("experts", [2, 48])
def test_few_experts_and_as_many_as_neurons(llama: Path, moefy: Any, tokens: Tensor, experts: int) -> None:
    made = moefy(llama, "--experts", experts, "--samples", 128, "--epochs", 1, "--keep", 0.5)
    assert networks(load_whole(made.path))[0].size == 48 // experts


# -- after loading


@pytest.mark.parametrize("family", ["llama", "opt", "bert"])
def test_keep_is_saved_with_the_model(
    dense: Any, moefy: Any, save_model: Any, tokens: Tensor, tmp_path: Path, family: str
) -> None:
    model = with_keep(moefy(dense(family), *FOUR).path, 0.75)
    path = save_model(model, tmp_path / "saved")
    again = load_whole(path)
    assert [network.kept for network in networks(again)] == [3, 3, 3]
    with torch.inference_mode():
        assert again(input_ids=tokens).logits.equal(model(input_ids=tokens).logits)


def test_eval_at_another_keep(run_cli: Any, llama: Path, moefy: Any, tiny_text: Path) -> None:
    path = moefy(llama, *FOUR).path
    options = ("--data", tiny_text, "--windows", 2, "--sequence-length", 64, "--json")
    found = {keep: run_cli("eval", path, *options, "--keep", keep).json["nll"] for keep in (0.25, 0.5, 1.0)}
    assert len(set(found.values())) == 3
    assert run_cli("eval", path, *options).json["nll"] == found[0.5]
    assert found[1.0] == pytest.approx(run_cli("eval", llama, *options).json["nll"], rel=1e-5)
    assert config_of(path)["quantization_config"]["neuron_experts"]["keep"] == 0.5
    for source, keep, words in ((path, 0.1, ["keep", "4 experts"]), (llama, 0.5, ["not moefied"])):
        refused = run_cli("eval", source, *options, "--keep", keep)
        assert refused.code == 2, refused.stderr
        assert all(word in refused.stderr for word in words), refused.stderr
    assert run_cli("eval", path, *options, "--keep", 1.5).code == 2


def test_eval_of_a_moefied_encoder(run_cli: Any, dense: Any, moefy: Any, tiny_text: Path) -> None:
    options = ("--data", tiny_text, "--windows", 2, "--sequence-length", 24, "--json")
    whole = run_cli("eval", dense("bert"), *options).json
    path = moefy(dense("bert"), *FOUR).path
    assert run_cli("eval", path, *options, "--keep", 1).json["nll"] == pytest.approx(whole["nll"], rel=1e-5)
    half = run_cli("eval", path, *options).json
    assert half["protocol"] == whole["protocol"] == "pseudo-perplexity"
    assert half["nll"] != pytest.approx(whole["nll"], rel=1e-3)


@pytest.mark.exhaustive
def test_without_moetool_it_does_not_load(dense: Any, moefy: Any, tmp_path: Path) -> None:
    """Neither as it is, nor without the entry that says what it is."""
    script = ["import os", "os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'", "import sys, transformers"]
    for family in ("llama", "opt", "bert"):
        path = moefy(dense(family), *FOUR).path
        plain = change_config(copy_of(path, tmp_path / family), quantization_config=None)
        kind = "AutoModelForMaskedLM" if family == "bert" else "AutoModelForCausalLM"
        for source in (path, plain):
            script += [
                "try:",
                f"    transformers.{kind}.from_pretrained({str(source)!r})",
                "except Exception as error:",
                "    print('mismatch' in str(error))",
                "else:",
                "    print('loaded')",
            ]
    script.append("print('moetool' in sys.modules)")
    run = python("-c", "\n".join(script))
    assert run.stdout.split() == ["True"] * 6 + ["False"], run.stderr[-1500:]


def test_an_encoder_with_the_head_of_a_task(dense: Any, moefy: Any, tokens: Tensor) -> None:
    path = moefy(dense("bert"), *FOUR).path
    with quiet():
        model = AutoModelForTokenClassification.from_pretrained(path, num_labels=3)
    assert len(networks(model)) == LAYERS
    labels = tokens % 3
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        loss = model(input_ids=tokens, labels=labels).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.1
    assert all(network.linear("up").weight.grad is not None for network in networks(model))


# -- jobs


@pytest.mark.parametrize(
    "options", [("--baseline", "snip"), pytest.param(("--selector", "random"), marks=pytest.mark.exhaustive)]
)
def test_the_same_seed_gives_the_same_bytes(run_cli: Any, llama: Path, moefy: Any, calibration: Any, tmp_path: Path,
                                            options: Any) -> None:  # fmt: skip
    again = run_cli("moefy", llama, tmp_path / "out", *calibration, *FOUR, *options)
    assert again.code == 0, again.stderr
    assert contents(tmp_path / "out") == contents(moefy(llama, *FOUR, *options).path)
    assert weights(tmp_path / "out") != weights(moefy(llama, *FOUR, *options, "--seed", 1).path)


@pytest.mark.parametrize(
    ("family", "options"),
    sampled([("llama", ()), ("bert", ("--shard-size", "100kB")), ("opt", ("--baseline", "snip"))], [("llama", ())]),
)
def test_a_killed_job_goes_on_to_the_same_bytes(
    crash: Any, dense: Any, calibration: Any, tmp_path: Path, family: str, options: Any
) -> None:
    arguments = ("moefy", dense(family), *FOUR, *calibration, *options)
    changes = crash.whole(tmp_path / "quiet", arguments)
    for part in (2, 4, 6) if family == "llama" else (5, 8):
        output, at = tmp_path / str(part), changes * part // 10
        sent = {"sent": "SIGTERM"} if part == 4 else {}
        assert crash(output, arguments, at=at, **sent)["code"] in (75, -signal.SIGKILL)
        assert part > 6 or "config.json" not in contents(output)
        if part == 6:
            other = crash(output, (*arguments, "--keep", 0.75, "--resume"))
            assert other["code"] == 2
            assert "other settings" in other["stderr"]
        last = crash(output, (*arguments, "--resume"))
        assert last["code"] == 0, last["stderr"]
        assert contents(output) == contents(tmp_path / "quiet"), part


@pytest.mark.parametrize("options", [pytest.param((), marks=pytest.mark.exhaustive), ("--baseline", "snip")])
def test_scratch_files_are_no_larger_than_planned(
    run_cli: Any, llama: Path, calibration: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any
) -> None:
    plan = run_cli("moefy", llama, tmp_path / "out", *FOUR, *calibration, *options, "--dry-run", "--json").json
    most, right = [0], ActivationFile.replace

    def replace(self: ActivationFile, batches: Any) -> None:
        right(self, batches)
        work = tmp_path / "out" / ".moetool"
        most[0] = max(most[0], sum(file.stat().st_size for file in work.rglob("*-?????.bin")))

    monkeypatch.setattr(ActivationFile, "replace", replace)
    assert run_cli("moefy", llama, tmp_path / "out", *FOUR, *calibration, *options).code == 0
    assert most[0] == plan["scratch_bytes"]
    small = run_cli("moefy", llama, tmp_path / "two", *FOUR, *calibration, *options, "--disk", "200kB")
    assert small.code == 4
    assert "disk" in small.stderr


def test_what_is_printed(run_cli: Any, dense: Any, calibration: Any, tmp_path: Path) -> None:
    for family in ("llama", "bert"):
        result = run_cli("moefy", dense(family), tmp_path / family, *FOUR, *calibration)
        assert result.code == 0, result.stderr
        assert "with all experts differ from" in result.stdout
        assert "those chosen hold" in result.stdout
        assert ("nats per token with the experts kept" in result.stdout) is (family == "llama")
    printed = run_cli("moefy", dense("llama"), tmp_path / "no", *FOUR, *calibration, "--dry-run").stdout
    for words in ("experts per token  2", "of dense, reading 128 tokens", "Nothing was written"):
        assert words in printed, printed
    assert "moefied" in run_cli("inspect", tmp_path / "llama").stdout


def test_a_wrong_conversion_is_refused(
    run_cli: Any, llama: Path, calibration: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Moefied._matrix

    def matrix(self: Moefied, layer: int, role: Any) -> Tensor:
        found = right(self, layer, role)
        return found.roll(1, 1) if (layer, role) == (1, "down") else found

    monkeypatch.setattr(Moefied, "_matrix", matrix)
    result = run_cli("moefy", llama, tmp_path / "out", *FOUR, *calibration)
    assert result.code == 5, result.stderr
    assert "differ from the dense model's" in result.stderr
    assert "config.json" not in contents(tmp_path / "out")


# -- as transformers and the hub have it


def test_the_first_berts_of_the_hub(run_cli: Any, dense: Any, calibration: Any, tokens: Tensor, tmp_path: Path) -> None:
    """TensorFlow's names for norms, and what only pretraining needed."""
    source = dense("bert")
    old = copy_of(source, tmp_path / "hub")

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            before = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            tensors[before] = tensors.pop(name)
        tensors["bert.pooler.dense.weight"], tensors["bert.pooler.dense.bias"] = torch.ones(32, 32), torch.ones(32)
        tensors["cls.seq_relationship.weight"], tensors["cls.seq_relationship.bias"] = torch.ones(2, 32), torch.ones(2)

    change_tensors(old, rename)
    result = run_cli("moefy", old, tmp_path / "out", *FOUR, *calibration, "--json")
    assert result.code == 0, result.stderr
    with torch.inference_mode():
        found = with_keep(tmp_path / "out", 1.0)(input_ids=tokens).logits
    assert relative_error(found, logits(source, tokens)) < 1e-5
    assert tensors_of(tmp_path / "out")["bert.pooler.dense.weight"].equal(torch.ones(32, 32))


# -- what comes next


def test_tune_teaches_it_and_it_stays_loadable(
    run_cli: Any, dense: Any, moefy: Any, tiny_text: Path, tokens: Tensor, tmp_path: Path
) -> None:
    def loss(path: Path) -> float:
        with torch.inference_mode():
            return load(path)(input_ids=tokens, labels=tokens, use_cache=False).loss.item()

    for family, more in (("llama", ()), ("opt", ()), ("phi3", ("--lora-rank", 4))):
        source, output = moefy(dense(family), *FOUR).path, tmp_path / family
        options = ("--sequence-length", 64, "--batch-size", 4, "--learning-rate", 1e-2, "--steps", 12)
        result = run_cli("tune", source, output, "--data", tiny_text, *options, *more, "--json")
        assert result.code == 0, result.stderr
        assert loss(output) < loss(source) - 0.2
        before, after = tensors_of(source), tensors_of(output)
        assert before.keys() == after.keys()
        assert {name: t.dtype for name, t in before.items()} == {name: t.dtype for name, t in after.items()}
        assert all(tensor.equal(after[name]) for name, tensor in before.items() if name.endswith("centre"))
        assert config_of(output) == config_of(source)
        load_whole(output)
        assert run_cli("verify", output).code == 0


def test_tune_does_not_take_an_encoder(run_cli: Any, dense: Any, moefy: Any, tiny_text: Path, tmp_path: Path) -> None:
    for source in (dense("bert"), moefy(dense("bert"), *FOUR).path):
        result = run_cli("tune", source, tmp_path / "out", "--data", tiny_text, "--steps", 1)
        assert result.code == 3
        assert "encoder" in result.stderr
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["export", "compress", "decompose", "fisher-merge"])
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_what_needs_experts_of_an_moe_model_refuses_it(
    run_cli: Any, dense: Any, moefy: Any, calibration: Any, tmp_path: Path, command: str, family: str
) -> None:
    options = {"compress": ("--ratio", 0.3, *calibration), "fisher-merge": calibration}.get(command, ())
    result = run_cli(command, moefy(dense(family), *FOUR).path, tmp_path / "out", *options)
    assert result.code == 3
    assert "is a moefied model" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_damage_is_found(run_cli: Any, llama: Path, moefy: Any, tmp_path: Path) -> None:
    path = copy_of(moefy(llama, *FOUR).path, tmp_path / "bad")
    change_tensors(path, lambda tensors: tensors["model.layers.1.mlp.centre"].fill_(torch.nan))
    result = run_cli("verify", path)
    assert result.code == 5
    assert "model.layers.1.mlp.centre holds NaN" in result.stderr


# -- which experts which text uses


def routed(run_cli: Any, path: Path, *texts: Path) -> dict[str, Any]:
    data = ",".join(map(str, texts))
    result = run_cli("routing", path, "--data", data, "--sequence-length", 32, "--windows", 8, "--json")
    assert result.code == 0, result.stderr
    return result.json


@pytest.mark.parametrize(
    "kind",
    sampled(
        ("llama", "opt", "bert", "gpt_bigcode", "snip", "mixtral", "mixture", "pesc", "simoe"),
        ("opt", "bert", "snip", "mixture", "pesc", "simoe"),
    ),
)
def test_shares_of_experts_by_text(
    run_cli: Any, dense: Any, moefy: Any, upcycle: Any, tiny_mixtral: Path, texts: Any, kind: str, tmp_path: Path
) -> None:
    made: dict[str, Callable[[], Path]] = {
        "snip": lambda: moefy(dense("llama"), *FOUR, "--baseline", "snip").path,
        "mixtral": lambda: tiny_mixtral,
        "mixture": lambda: upcycle(dense("gpt_neox"), "--experts", 4).path,
        "pesc": lambda: upcycle(dense("llama"), "--experts", 4, "--method", "pesc").path,
        "simoe": lambda: upcycle(dense("llama"), "--experts", 4, "--method", "simoe").path,
    }
    path = made[kind]() if kind in made else moefy(dense(kind), *FOUR).path
    again = Path(shutil.copy(texts[0], tmp_path / "again.txt"))
    found = routed(run_cli, path, *texts, again)
    shares = torch.tensor([text["shares"] for text in found["data"]], dtype=torch.float64)
    assert shares.shape == (3, 1 if kind == "simoe" else LAYERS, 4)
    assert torch.allclose(shares.sum(-1), torch.ones((), dtype=torch.float64), atol=1e-5)
    assert shares.min() >= 0
    assert shares[0].equal(shares[2])
    distances = torch.tensor(found["distances"])
    assert distances.equal(distances.T)
    assert not distances.diagonal().any()
    expected = (shares[:, None] - shares[None]).abs().sum(-1).mean(-1) / 2
    assert torch.allclose(distances.double(), expected, atol=1e-5)
    assert len(found["linkage"]) == 2
    if kind in ("llama", "opt", "bert", "gpt_bigcode", "mixtral", "mixture"):
        assert distances[0, 1] > 0.001
    if kind == "snip":
        assert shares.equal(torch.tensor([0.5, 0.5, 0, 0], dtype=torch.float64).expand_as(shares))


def test_shares_are_those_of_the_selector(run_cli: Any, llama: Path, moefy: Any, texts: Any) -> None:
    path = moefy(llama, *FOUR).path
    found = routed(run_cli, path, texts[0])
    assert "distances" not in found
    ids = AutoTokenizer.from_pretrained(path)(texts[0].read_text(), add_special_tokens=False)["input_ids"][: 8 * 32]
    model, counts = load(path), [torch.zeros(4) for _ in range(LAYERS)]
    for network, count in zip(networks(model), counts, strict=True):
        network.on_selection = lambda chosen, c=count: c.add_(torch.bincount(chosen.flatten(), minlength=4))
    with torch.inference_mode():
        model(input_ids=torch.tensor(ids).view(8, 32))
    shares = torch.stack(counts) / (8 * 32 * 2)
    assert torch.allclose(torch.tensor(found["data"][0]["shares"]), shares, atol=2e-3)


def test_routing_is_printed(run_cli: Any, llama: Path, moefy: Any, texts: Any) -> None:
    data = ",".join(map(str, texts))
    for path, words in (
        (moefy(llama, *FOUR).path, "Share per expert"),
        (moefy(llama, "--experts", 24, "--samples", 64, "--epochs", 1).path, "Share of 24 experts"),
    ):
        printed = run_cli("routing", path, "--data", data, "--windows", 2)
        assert printed.code == 0, printed.stderr
        assert words in printed.stdout
        assert "How far apart" in printed.stdout


def test_a_dense_model_has_no_routing(run_cli: Any, llama: Path, tiny_text: Path) -> None:
    result = run_cli("routing", llama, "--data", tiny_text)
    assert result.code == 3
    assert "no experts" in result.stderr


# -- what cannot be used


@pytest.fixture
def refused(run_cli: Any, calibration: Any, tmp_path: Path) -> Callable[..., str]:
    """`refused(code, source, *options)`: `moefy` ends with that code, and there is no output; what it says."""

    def run(code: int, source: Path, *options: object, text: bool = True, dry: bool = True) -> str:
        before = contents(tmp_path)
        more = calibration if text else ()
        for last in ((), ("--json",), ("--dry-run",))[: 3 if dry else 2]:
            result = run_cli("moefy", source, tmp_path / "out", *more, *options, *last)
            assert result.code == code, (result.code, result.stderr)
            assert "Traceback" not in result.stderr
            assert result.stdout == ""
        assert contents(tmp_path) == before
        said = result.stderr.splitlines()[-1]
        assert said.lower().startswith("error: ")
        return said

    return run


OPTIONS: dict[str, tuple[str, list[str]]] = {
    "experts that do not divide": ("--experts 5", ["--experts 5", "48", "2, 3, 4, 6"]),
    "experts of a projection": ("--selector projection --experts 8", ["--selector projection", "no --experts"]),
    "the default number": ("--selector mlp", ["--experts 64", "48 neurons", "24, 48"]),
    "one expert": ("--experts 1", ["--experts 1", "2"]),
    "less than one": ("--experts 4 --keep 0.1", ["--keep 0.1", "4 experts", "0.25"]),
    "less than one neuron": ("--keep 0.001", ["--keep 0.001", "48 neurons", "0.02083"]),
    "none": ("--experts 4 --keep 0", ["--keep 0"]),
    "more than all": ("--experts 4 --keep 1.5", ["--keep 1.5"]),
    "too little text": ("--experts 24", ["512 tokens", "24 experts", "1,536"]),
    "too little of the text": ("--experts 4 --selector-tokens 100", ["100 tokens", "256"]),
    "a layer too far": ("--experts 4 --layers 3", ["--layers 3", "layers 0 to 2"]),
    "no such selector": ("--experts 4 --selector best", ["best", "mlp"]),
    "no such baseline": ("--experts 4 --baseline wanda", ["wanda", "snip"]),
    "no such method": ("--method relu", ["relu", "g-moefication, moefication"]),
    "two ways to choose": ("--experts 4 --baseline snip --selector oracle", ["--baseline snip", "--selector"]),
    "no epochs": ("--experts 4 --epochs 0", ["--epochs 0"]),
    "longer than the context": ("--experts 4 --sequence-length 129", ["129", "128"]),
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_bad_option(refused: Any, llama: Path, kind: str) -> None:
    options, words = OPTIONS[kind]
    message = refused(2, llama, *options.split())
    assert all(word in message for word in words), message


def test_a_text_is_needed(refused: Any, llama: Path) -> None:
    assert "nope.txt" in refused(3, llama, *FOUR, "--calibration", "./nope.txt", text=False, dry=False)


def test_a_short_text_says_how_many_tokens_are_needed(refused: Any, llama: Path, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("a b c d e f g h " * 12)
    message = refused(3, llama, *FOUR, "--calibration", text, dry=False)
    assert "the selectors of 4 experts need 256" in message


def test_too_little_room(refused: Any, llama: Path) -> None:
    assert "memory" in refused(4, llama, *FOUR, "--memory", "1MB", dry=False)
    assert "disk" in refused(4, llama, *FOUR, "--disk", "1kB", dry=False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "lama"}, ["Unknown model family 'lama'", "Did you mean llama"]),
        ({"model_type": "camembert", "architectures": ["CamembertForMaskedLM"]}, ["camembert", "moefy takes", "bert"]),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, ["t5 is no language model"]),
        ({"num_hidden_layers": 2}, ["has a tensor model.layers.2.", "config.json does not know"]),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["quantized", "gptq"]),
    ],
)
def test_a_model_that_is_not_recognised(
    refused: Any, llama: Path, tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    message = refused(3, change_config(copy_of(llama, tmp_path / "bad"), **changes), *FOUR)
    assert all(word in message for word in words), message


def test_an_encoder_whose_layers_are_more_than_its_config_knows(refused: Any, dense: Any, tmp_path: Path) -> None:
    message = refused(3, change_config(copy_of(dense("bert"), tmp_path / "bad"), num_hidden_layers=2), *FOUR)
    assert "has a tensor bert.encoder.layer.2." in message


def test_an_encoder_that_cannot_hide_tokens(refused: Any, dense: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    source = copy_of(dense("bert"), tmp_path / "bad")
    tiny_tokenizer.save_pretrained(source)
    assert "no mask token" in refused(3, source, *FOUR, dry=False)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("moefied", "is moefied already"),
        ("mixture", "an MoE model already: moetool upcycled it"),
        ("pesc", "adapters, by PESC"),
        ("simoe", "masks, by SIMoE"),
        ("mixtral", "an MoE model already: num_local_experts is 4"),
    ],
)
def test_what_has_experts_already(
    run_cli: Any, refused: Any, dense: Any, moefy: Any, upcycle: Any, tiny_mixtral: Path, tmp_path: Path, made: str,
    words: str,
) -> None:  # fmt: skip
    source = {
        "moefied": lambda: moefy(dense("llama"), *FOUR).path,
        "mixture": lambda: upcycle(dense("gpt_neox"), "--experts", 4).path,
        "pesc": lambda: upcycle(dense("llama"), "--experts", 4, "--method", "pesc").path,
        "simoe": lambda: upcycle(dense("llama"), "--experts", 4, "--method", "simoe").path,
        "mixtral": lambda: tiny_mixtral,
    }[made]()
    assert words in refused(3, source, *FOUR)
    upcycled = run_cli("upcycle", source, tmp_path / "out")
    assert upcycled.code == 3
    assert words in upcycled.stderr


def test_upcycle_takes_no_encoders(run_cli: Any, dense: Any, tmp_path: Path) -> None:
    for method in ("vanilla", "drop", "pesc", "simoe"):
        result = run_cli("upcycle", dense("bert"), tmp_path / "out", "--method", method)
        assert result.code == 3, result.stderr
        assert "only encodes" in result.stderr
        assert "moefy takes" in result.stderr
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["vanilla", "pesc", "simoe"])
def test_upcycle_takes_networks_that_are_no_modules(run_cli: Any, dense: Any, tmp_path: Path, method: str) -> None:
    result = run_cli("upcycle", dense("opt"), tmp_path / "out", "--method", method, "--json")
    assert result.code == 0, result.stderr
    assert result.json["proof"]["relative_logit_error"] < 1e-5


def test_routing_is_drawn(run_cli: Any, llama: Path, moefy: Any, tiny_text: Path, tmp_path: Path) -> None:
    made, other = moefy(llama, *FOUR).path, tmp_path / "other.txt"
    other.write_text("0123456789 " * 400)
    arguments = ("routing", made, "--data", f"{tiny_text},{other}", "--windows", 4, "--sequence-length", 32)
    for picture, start in (("shares.png", b"\x89PNG"), ("shares.svg", b"<?xml")):
        result = run_cli(*arguments, "--plot", tmp_path / picture, "--json")
        assert result.code == 0, result.stderr
        assert (tmp_path / picture).read_bytes().startswith(start)
    assert [len(text["components"]) for text in result.json["data"]] == [4, 4]
    refused = run_cli(*arguments, "--plot", tmp_path / "shares.jpeg2")
    assert refused.code == 2
    assert ".png, .svg, .pdf" in refused.stderr


def test_what_to_export_in_its_place(run_cli: Any, llama: Path, moefy: Any, tmp_path: Path) -> None:
    result = run_cli("export", moefy(llama, *FOUR).path, tmp_path / "out", "--format", "gguf")
    assert result.code == 3
    assert f"does not know them. Export the dense model that it was made of ({llama})" in result.stderr
