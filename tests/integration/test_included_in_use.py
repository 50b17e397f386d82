"""Compressed models with quantized attention and embeddings in the hands of peft, and saved again after changes."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import peft
import pytest
import torch
from checkpoints import load
from derived_families import DERIVED
from stored_experts import distance, model_of
from torch import Tensor, nn

import moetool
from moetool.errors import InvalidInputError, UsageError
from moetool.quiet import quiet
from moetool.runtime.modules import quantized, routed

TOKENS = torch.arange(3, 35).view(2, 16)
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpoint:FutureWarning")


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model.eval()(input_ids=TOKENS).logits
    return found


def saved(model: Any, path: Path) -> Any:
    """What is loaded of a model that was saved."""
    with quiet():
        model.save_pretrained(path)
    return load(path)


@pytest.fixture(scope="module", params=["attention,embeddings", "attention:6,embeddings:5"])
def included(
    request: pytest.FixtureRequest,
    compress: Any,
    make_mixtral: Any,
    save_model: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A tied model whose experts are codes of 8 bits, attention and embeddings of as many or fewer."""
    source = save_model(make_mixtral(tie_word_embeddings=True), tmp_path_factory.mktemp("tied") / "model")
    options = ("--method", "quantize", "--bits", 8, "--rounding", "nearest", "--group-size", 16)
    path: Path = compress(source, *options, "--include", request.param).path
    return path


@pytest.fixture(params=["kernels", "plain"], autouse=True)
def _where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain":
        for module in (quantized, routed):
            monkeypatch.setattr(module, "problem", lambda _: "there are none")


def adapted(model: Any, **options: Any) -> Any:
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # of what was not matched
        torch.manual_seed(0)
        return peft.get_peft_model(model, peft.LoraConfig(r=4, **options))


def check_adapter(adapter: Any, before: Tensor) -> None:
    """One step reaches every second factor, and shows."""
    adapter(input_ids=TOKENS, labels=TOKENS).loss.backward()
    zero = {name: own for name, own in adapter.named_parameters() if "lora_B" in name or "lora_embedding_A" in name}
    assert zero
    assert not [name for name, own in zero.items() if own.grad is None or not own.grad.any()]
    with torch.no_grad():
        for own in zero.values():
            own -= 0.1 * own.grad / own.grad.norm()
    assert distance(logits(adapter), before) > 1e-3


ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"], ["embed_tokens"], ["q_proj", "embed_tokens"]])
def test_adapters_on_quantized_layers(included: Path, targets: Any, tmp_path: Path) -> None:
    model = load(included)
    before = logits(model)
    adapter = adapted(model, target_modules=targets)
    if targets == "all-linear":
        names = {name.split(".lora_B")[0].split(".")[-1] for name in adapter.state_dict() if "lora_B" in name}
        assert names >= ATTENTION
        assert "experts" not in names
    assert distance(logits(adapter), before) < 1e-6
    check_adapter(adapter, before)
    expected = logits(adapter)
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # embeddings are saved, too
        adapter.save_pretrained(tmp_path / "adapter")
        warnings.simplefilter("ignore")  # of what is tied, and of patterns for experts
        again = peft.PeftModel.from_pretrained(load(included), tmp_path / "adapter")
    assert distance(logits(again), expected) < 1e-6
    if "embed_tokens" in targets and model.config.tie_word_embeddings:
        return  # merged, the tied head would change, too, as in any model
    merged = again.merge_and_unload()
    assert distance(logits(merged), expected) < 1e-5
    assert distance(logits(saved(merged, tmp_path / "merged")), expected) < 1e-5


def test_safe_merging_and_adapters_that_read_the_matrix(included: Path) -> None:
    """DoRA takes norms of it, PiSSA its singular vectors."""
    before = logits(load(included))
    for options in ({"use_dora": True}, {"init_lora_weights": "pissa"}):
        adapter = adapted(load(included), target_modules=["q_proj", "v_proj"], **options)
        assert distance(logits(adapter), before) < 1e-5
    adapter = adapted(load(included), target_modules=["q_proj"], init_lora_weights=False)
    expected = logits(adapter)
    assert distance(logits(adapter.merge_and_unload(safe_merge=True)), expected) < 1e-5


@pytest.fixture(scope="module")
def untied(compress: Any, make_mixtral: Any, save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head and embeddings are stored in codes of their own."""
    source = save_model(make_mixtral(tie_word_embeddings=False), tmp_path_factory.mktemp("untied") / "model")
    options = ("--method", "quantize", "--bits", 8, "--rounding", "nearest", "--include", "attention,embeddings")
    path: Path = compress(source, *options).path
    return path


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
@pytest.mark.parametrize(
    ("is_tied", "names"),
    [
        (True, ["lm_head"]),
        (True, ["embed_tokens", "lm_head"]),
        (False, ["lm_head"]),
        (False, ["embed_tokens"]),
        (False, ["embed_tokens", "lm_head"]),
        (False, ["q_proj"]),
    ],
)
def test_layers_of_codes_that_are_trained_in_full(
    included: Path, untied: Path, is_tied: bool, names: list[str], tmp_path: Path
) -> None:
    """Copied for it, each has a matrix; the codes of others stay, those of an embedding that a head is tied to, too."""
    path = included if is_tied else untied
    model = load(path)
    before = logits(model)
    adapter: Any = adapted(model, target_modules=["v_proj"], modules_to_save=names, task_type="CAUSAL_LM")
    trained = {name: own for name, own in adapter.named_parameters() if ".modules_to_save." in name}
    assert {name.split(".")[-4] for name in trained} == set(names)
    assert all(own.requires_grad and name.endswith(".weight") for name, own in trained.items())
    torch.testing.assert_close(logits(adapter), before, rtol=1e-4, atol=1e-4)
    check_adapter(adapter, before)
    with torch.no_grad():
        for own in trained.values():
            own -= 0.1 * own.grad / own.grad.norm()
    expected = logits(adapter)
    with quiet():
        adapter.save_pretrained(tmp_path / "adapter")
        again = peft.PeftModel.from_pretrained(load(path), tmp_path / "adapter")
    torch.testing.assert_close(logits(again), expected)
    merged = adapter.merge_and_unload()  # which unties the config
    assert distance(logits(merged), expected) < 1e-5
    assert distance(logits(saved(merged, tmp_path / "merged")), expected) < 1e-5


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
def test_a_head_whose_embedding_alone_was_trained_in_full(included: Path, tmp_path: Path) -> None:
    """It keeps the codes of the old one, which no file would have: it says so, and what gives it a matrix."""
    adapter: Any = adapted(load(included), target_modules=["v_proj"], modules_to_save=["embed_tokens"])
    with torch.no_grad():
        adapter.get_input_embeddings().weight[3:8] = 0
    expected, merged = logits(adapter), adapter.merge_and_unload()
    merged.config.tie_word_embeddings = False
    with pytest.raises(InvalidInputError, match=r"model.lm_head = copy.deepcopy\(model.lm_head\)"):
        merged.save_pretrained(tmp_path / "lost")
    merged.lm_head = copy.deepcopy(merged.lm_head)
    assert distance(logits(saved(merged, tmp_path / "merged")), expected) < 1e-5


def test_the_adapters_of_transformers(included: Path) -> None:
    model = load(included)
    before = logits(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        except ValueError as error:
            if "version of PEFT" not in str(error):  # 5.24.0 wants one that is not published
                raise
            pytest.skip(str(error))
    check_adapter(model, before)


@pytest.mark.parametrize("kind", ["no-base", "rotated-base", "trellis", "low-rank"])
def test_placeholders_of_bases_are_not_adapted(kind: str) -> None:
    """Where the base is not a matrix, an adapter of it would train nothing; all else is adapted, with a word."""
    model = model_of(kind)
    targets = ["experts.gate_up_proj", "experts.up_proj", "experts.down_proj"]
    held = {name for name, _ in model.named_parameters() if name.endswith(tuple(targets))}
    before = logits(model)
    if not held:
        with pytest.raises(ValueError, match="target_parameters"):
            peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[], target_parameters=targets))
        with pytest.warns(RuntimeWarning, match="no parameter was matched"):
            adapter = peft.get_peft_model(
                model, peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=targets)
            )
    else:
        adapter = adapted(model, target_modules="all-linear")
    check_adapter(adapter, before)


def _copied(model: Any) -> Any:
    copied = copy.deepcopy(model)
    _resized(copied)
    return copied


def _resized(model: Any) -> None:
    model.resize_token_embeddings(model.config.vocab_size + 8, mean_resizing=False)


def _shrunk(model: Any) -> None:
    model.resize_token_embeddings(model.config.vocab_size - 8)


def _given_embeddings(model: Any) -> None:
    given = nn.Embedding(*model.get_input_embeddings().weight.shape)
    given.weight.data = model.get_input_embeddings().weight.detach().clone()
    model.set_input_embeddings(given)
    model.tie_weights()


def _written(model: Any) -> None:
    model.get_input_embeddings().weight.data[-4:] = 0


def _replaced(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    linear = nn.Linear(*reversed(attention.q_proj.weight.shape), bias=False)
    linear.weight.data = 2 * attention.q_proj.weight.detach().clone()
    attention.q_proj = linear


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda _: None,
    "tied again": lambda model: model.tie_weights(),
    "resized": _resized,
    "shrunk": _shrunk,
    "other embeddings": _given_embeddings,
    "a row written": _written,
    "a layer replaced": _replaced,
    "a copy": _copied,
    "dense": moetool.synthesize,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_is_saved_as_it_is(included: Path, change: str, tmp_path: Path) -> None:
    model = load(included)
    model = CHANGES[change](model) or model
    assert logits(saved(model, tmp_path)).equal(logits(model))


def test_an_embedding_that_a_head_has_lost_is_not_saved(included: Path, tmp_path: Path) -> None:
    """Rather than written so that it cannot be read."""
    model = load(included)
    head = nn.Linear(*reversed(model.lm_head.weight.shape), bias=False)
    model.set_output_embeddings(head)
    with pytest.raises(InvalidInputError, match="tie_word_embeddings = False"):
        model.save_pretrained(tmp_path)
    model.config.tie_word_embeddings = False
    assert logits(saved(model, tmp_path)).equal(logits(model))
    model = load(included)
    model.config.tie_word_embeddings = False
    with pytest.raises(InvalidInputError, match="tie_word_embeddings = True"):
        model.save_pretrained(tmp_path / "untied")
    model = load(included)
    model.set_input_embeddings(nn.Embedding(*model.get_input_embeddings().weight.shape))
    with pytest.raises(InvalidInputError, match=r"model.tie_weights\(\)"):
        model.save_pretrained(tmp_path / "other")


def test_codes_take_no_gradients(included: Path) -> None:
    layer = load(included).model.layers[0].self_attn.q_proj
    assert layer.weight.shape == (layer.out_features, layer.in_features)
    assert (layer.weight @ torch.eye(layer.in_features)).equal(layer.matrix())
    layer.weight.requires_grad_(False)
    with pytest.raises(UsageError, match="takes no gradients"):
        layer.weight.requires_grad_(True)


@pytest.mark.parametrize("family", ["gemma4_text", "inkling_text"])
def test_families_whose_embeddings_compute(
    family: str, compress: Any, save_model: Any, run_cli: Any, tmp_path: Path
) -> None:
    """Gemma's multiply what they look up, Inkling's normalize it: in codes as in the exported matrices."""
    source = save_model(families.build(family, **DERIVED[family]), tmp_path / "source")
    options = ("--method", "quantize", "--bits", 8, "--rounding", "nearest", "--include", "embeddings")
    made: Path = compress(source, *options).path
    assert run_cli("export", made, tmp_path / "dense", "--format", "dense-experts").code == 0
    model, dense = load(made), load(tmp_path / "dense")
    torch.testing.assert_close(logits(model), logits(dense), rtol=0, atol=1e-5)
    again = saved(model, tmp_path / "again")
    assert logits(again).equal(logits(model))
