"""Compressed experts in the hands of transformers, accelerate and peft: on kernels where they may, right anywhere."""

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_submodules
from stored_experts import STORED, batch, distance, experts_in, experts_of, is_on_kernels, model_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from moetool.compiled.compiler import problem
from moetool.quiet import quiet
from moetool.runtime.loading import run_experts_of_any_width

TOKENS = torch.arange(3, 35).view(2, 16)
pytestmark = [
    pytest.mark.skipif(bool(problem()), reason=problem()),
    pytest.mark.filterwarnings(
        "ignore:.*gradient_checkpoint:FutureWarning"
    ),  # between versions of transformers and peft
]
every_kind = pytest.mark.parametrize("kind", STORED)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(input_ids=TOKENS).logits
    return found


@every_kind
def test_a_token_is_told_the_same_alone_and_among_others(kind: str) -> None:
    """Up to four tokens to the bit: their sums come in the same order. More of them meet a dense base in one product
    of torch's, which has its own; so have its activations at the end of what is no multiple of its vectors."""
    for experts in experts_of(kind):
        if experts.layout.dynamic_channels:
            continue  # what is left out depends on the batch
        hidden, chosen, weights = batch(experts, 8)
        with torch.no_grad():
            alone = torch.cat([experts(hidden[i : i + 1], chosen[i : i + 1], weights[i : i + 1]) for i in range(8)])
            if experts.intermediate_dim % 16 == 0:
                assert experts(hidden[:4], chosen[:4], weights[:4]).equal(alone[:4])
            assert distance(experts(hidden, chosen, weights), alone) < 1e-6
            assert experts(hidden[:0], chosen[:0], weights[:0]).shape == (0, experts.hidden_dim)


@every_kind
def test_evaluation_with_and_without_gradients(kind: str) -> None:
    model = model_of(kind)
    assert distance(model(input_ids=TOKENS).logits.detach(), logits(model)) < 1e-5
    assert all(map(is_on_kernels, experts_in(model)))
    with torch.inference_mode():
        found = model(input_ids=TOKENS).logits
    assert found.clone().equal(logits(model))


@every_kind
def test_autocast(kind: str) -> None:
    """At least as near to fp32 as the plain form is under autocast, but for noise."""
    for experts in experts_of(kind):
        for tokens in (1, 40):
            arguments = batch(experts, tokens)
            with torch.no_grad():
                exact = experts.eager(*arguments)
                with torch.autocast("cpu", torch.bfloat16):
                    found, plain = experts(*arguments), experts.eager(*arguments)
            assert found.dtype == plain.dtype
            assert distance(found, exact) < max(1.05 * distance(plain, exact), 2**-8)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(use_reentrant: bool) -> None:
    """Reentrant checkpoints run forward without gradients: on kernels, too."""

    def gradients(model: Any) -> list[Tensor]:
        model.train().get_input_embeddings().weight.requires_grad_()
        model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    model = model_of("quantised")
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    found, expected = gradients(model), gradients(model_of("quantised"))
    assert len(found) == len(expected)
    assert all(distance(own, other) < 1e-4 for own, other in zip(found, expected, strict=True) if other.any())


@every_kind
def test_training_goes_on_between_evaluations(kind: str) -> None:
    model = model_of(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        with torch.inference_mode():
            model(input_ids=TOKENS)
            model(input_ids=TOKENS[:1, :1])
        model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        optimizer.step()
        assert distance(logits(model), model(input_ids=TOKENS).logits.detach()) < 1e-5
        assert all(map(is_on_kernels, experts_in(model)))


@every_kind
def test_offloaded_experts_do_without_and_get_them_back(kind: str) -> None:
    """accelerate puts weights back on the disk after every call: addresses would be kept of what is gone."""
    model = model_of(kind)
    expected = logits(model)
    with quiet():
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
    for _ in range(2):
        assert distance(logits(model), expected) < 1e-5
        assert not any(map(is_on_kernels, experts_in(model)))
    remove_hook_from_submodules(model)
    assert all(map(is_on_kernels, experts_in(model)))
    assert logits(model).equal(expected)


def test_only_offloaded_layers_do_without(tmp_path: Path) -> None:
    model = model_of("low-rank")
    with quiet():
        model.save_pretrained(tmp_path / "model")
        places = dict.fromkeys(["model.embed_tokens", "model.layers.1", "model.layers.2", "model.norm"], "cpu")
        places |= {"model.rotary_emb": "cpu", "lm_head": "cpu", "model.layers.0": "disk"}
        loaded = AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", device_map=places, offload_folder=str(tmp_path / "disk")
        )
    assert distance(logits(loaded), logits(model)) < 1e-5
    assert list(map(is_on_kernels, experts_in(loaded))) == [False, True, True]


def test_hooks_that_offload_nothing_leave_kernels() -> None:
    model = model_of("low-rank")
    expected = logits(model)
    add_hook_to_module(model, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    for experts in experts_in(model):
        add_hook_to_module(experts, AlignDevicesHook(execution_device="cpu"))
    assert logits(model).equal(expected)
    assert all(map(is_on_kernels, experts_in(model)))


def test_adapters_on_attention_leave_kernels() -> None:
    peft = pytest.importorskip("peft")
    model = model_of("quantised")
    before = logits(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    with torch.no_grad():
        found = logits(adapted)
    assert distance(found, before) > 1e-3
    assert distance(adapted(input_ids=TOKENS).logits.detach(), found) < 1e-5
    assert all(map(is_on_kernels, experts_in(adapted)))


@pytest.mark.parametrize("target", ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "moetool.0.gate.u"])
def test_adapters_on_bases_and_deltas(target: str) -> None:
    """peft computes the adapted tensor at every call: no kernel can have its address. Merged it is one like others."""
    peft = pytest.importorskip("peft")
    model = model_of("low-rank")
    before = logits(model)
    options = {"target_modules": [], "target_parameters": [target], "init_lora_weights": False}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, **options))
    found = logits(adapted)
    assert distance(found, before) > 1e-3
    assert distance(adapted(input_ids=TOKENS).logits.detach(), found) < 1e-5
    adapted(input_ids=TOKENS, labels=TOKENS).loss.backward()
    trained = [name for name, own in adapted.named_parameters() if own.grad is not None and own.grad.any()]
    assert trained
    assert all("lora_" in name for name in trained)
    with adapted.disable_adapter():
        assert distance(logits(adapted), before) < 1e-5
    merged = adapted.merge_and_unload()
    assert distance(logits(merged), found) < 1e-5
    assert all(map(is_on_kernels, experts_in(merged)))


@pytest.mark.parametrize("target", ["modules", "base", "delta"])
def test_adapters_are_saved_loaded_and_merged(target: str, tmp_path: Path) -> None:
    """All by peft: attention, the base that experts share, or one expert's delta. What is merged is saved as any other
    compressed model."""
    peft = pytest.importorskip("peft")
    options: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
    if target != "modules":
        parameters = {"base": "mlp.experts.gate_up_proj", "delta": "moetool.0.gate.u"}
        options = {"target_modules": [], "target_parameters": [parameters[target]]}
    adapted = peft.get_peft_model(model_of("low-rank"), peft.LoraConfig(r=4, init_lora_weights=False, **options))
    expected = logits(adapted)
    with quiet():
        adapted.save_pretrained(tmp_path / "adapter")
    fresh = model_of("low-rank")
    assert distance(logits(fresh), expected) > 1e-3
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter")
    assert distance(logits(loaded), expected) < 1e-6
    merged = loaded.merge_and_unload()
    assert distance(logits(merged), expected) < 1e-5
    with quiet():
        merged.save_pretrained(tmp_path / "merged")
        again, told = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert distance(logits(again), logits(merged)) < 1e-6


def test_eager_is_the_plain_form_and_anything_else_is_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = model_of("quantised")
    (experts, *_) = experts_in(model)
    ran: list[str] = []
    monkeypatch.setattr(type(experts), "_forward", lambda *_: ran.append("plain") or torch.zeros(32, 32))
    for name in ("grouped_mm", "moetool", "batched_mm", "eager"):
        model.set_experts_implementation(name)
        logits(model)
        assert bool(ran) is (name == "eager")
    monkeypatch.undo()
    with quiet():
        model.save_pretrained(tmp_path)
        assert "experts_implementation" not in (tmp_path / "config.json").read_text()
        again = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="moetool")
    assert distance(logits(again), logits(model)) < 1e-5
    assert all(map(is_on_kernels, experts_in(again)))


def test_odd_widths_leave_compressed_experts_on_kernels() -> None:
    """Of a model of which some layers are not compressed, and have a width that grouped products cannot take."""
    model = model_of("low-rank")
    native = torch.nn.Parameter(torch.zeros(4, 33, 32))
    model.model.layers[0].mlp.native = holder = torch.nn.Module()
    holder.is_transposed, holder._apply_gate, holder.down_proj = False, None, native
    assert model.config._experts_implementation == "grouped_mm"
    run_experts_of_any_width(model)
    assert model.config._experts_implementation == "moetool"
    assert all(experts.may_run_on_kernels() for experts in experts_in(model))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["no-base", "shared-expert-without-base"])
def test_no_product_with_a_base_that_is_none(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Tensor:
        raise AssertionError("there is no base to multiply with")

    for experts in experts_of(kind):
        stored = experts.on_kernels()
        assert [own.base for own in stored.roles.values()] == [None] * 3
        monkeypatch.setattr(experts, "_base_down", refuse)
        monkeypatch.setattr(experts, "_compact", refuse)
        hidden, chosen, weights = batch(experts, 40)
        eager = experts.eager(hidden, chosen, weights)
        for tokens in (40, 2):  # sorted by expert, and by number
            found = stored.forward(hidden[:tokens], chosen[:tokens], weights[:tokens])
            assert distance(found, eager[:tokens]) < 1e-5
