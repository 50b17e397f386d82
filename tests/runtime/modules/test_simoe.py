"""Sparse interpolated experts: what they compute, from which prompt, and what they are in transformers."""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_families import DENSE_FAMILIES
from sampling import DENSE_STRUCTURES, sampled
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel
from upcycled import interpolated, load, logits, open_dense, prompt, relative_error, save_dense, write_upcycled

from moetool.format.entry import custom_entry
from moetool.format.kinds.simoe import SimoeSpec
from moetool.numerics.hard_concrete import SHIFT, median_gate
from moetool.quiet import quiet
from moetool.runtime.cache_name import CACHE, cache_of
from moetool.runtime.modules.simoe import InterpolatedLinear, closed_share, open_share, overlap_penalty, sites
from moetool.runtime.modules.simoe_mixing import FOLDING, interpolation_of, weigh_equally
from moetool.tune.examples import IGNORED, Example, collate
from moetool.tune.trainer import recompute_activations

EXPERTS = 4
GENERATE: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}

families_and_pruned = pytest.mark.parametrize(
    ("family", "pruned"),
    sampled(
        product(DENSE_FAMILIES, (False, True)),
        [*zip(DENSE_STRUCTURES, (False, True) * 3, strict=True), ("llama", True), ("qwen2-windows", True)],
    ),
)

MakeModel = Callable[..., Any]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("interpolated")


@pytest.fixture(scope="module")
def fresh(directory: Path) -> MakeModel:
    """`fresh("llama")`: the path of a model as the conversion leaves it; the dense one is beside it."""

    def make(family: str) -> Path:
        path = directory / family
        if not path.exists():
            write_upcycled(path, interpolated(open_dense(save_dense(directory / f"{family}-dense", family))))
        return path

    return make


@pytest.fixture(scope="module")
def trained(fresh: MakeModel) -> MakeModel:
    """`trained("llama", pruned=False)`: a model whose differences, masks and router have learnt something."""

    def make(family: str = "llama", *, pruned: bool = False) -> Any:
        model = load(fresh(family))
        draw = torch.Generator().manual_seed(3)
        router = interpolation_of(model)
        assert router is not None
        with torch.no_grad():
            for site in sites(model).values():
                site.delta.copy_(0.5 * torch.randn(site.delta.shape, generator=draw) / site.delta.shape[1] ** 0.5)
                site.log_phi.copy_(2 * torch.randn(site.log_phi.shape, generator=draw) - 1.5)
            router.second.weight.copy_(3 * torch.randn(router.second.weight.shape, generator=draw))
            router.second.bias.copy_(0.3 * torch.randn(router.second.bias.shape, generator=draw))
            router.first.bias.copy_(0.3 * torch.randn(router.first.bias.shape, generator=draw))
        if pruned:
            for site in sites(model).values():
                site.prune()
            channels = {name: site.delta.shape[1] for name, site in sites(model).items()}
            del router.multiplier
            router.trains_masks = False
            model.config.quantization_config.interpolated["channels"] = channels
        return model

    return make


def alpha_of(model: Any) -> Tensor:
    router = interpolation_of(model)
    assert router is not None
    assert router.alpha is not None
    return router.alpha


def routed(model: Any, hidden: Tensor) -> Tensor:
    """α by the router's own two layers, from final hidden states `[examples, hidden]`."""
    router = interpolation_of(model)
    assert router is not None
    inner = F.silu(hidden @ router.first.weight.T + router.first.bias)
    return (inner @ router.second.weight.T + router.second.bias).softmax(-1)


def folded(dense: Any, model: Any, alpha: Tensor) -> Any:
    """The dense model with the weights that one α `[experts]` makes."""
    dense = copy.deepcopy(dense)
    for name, site in sites(model).items():
        dense.get_submodule(name).weight = nn.Parameter(site.folded(alpha))
    return dense


def dense_of(fresh: MakeModel, family: str = "llama") -> Any:
    path = fresh(family)
    return load(path.with_name(f"{family}-dense"))


# One layer.


@pytest.mark.parametrize("bias", [True, False])
def test_one_layer_is_the_formula(bias: bool, trained: MakeModel) -> None:
    router = interpolation_of(trained())
    assert router is not None
    torch.manual_seed(0)
    linear = nn.Linear(7, 5, bias=bias)
    site = InterpolatedLinear(linear, router, None)
    nn.init.normal_(site.delta)
    nn.init.normal_(site.log_phi, 0, 2)
    alpha = torch.randn(2, EXPERTS).softmax(-1)
    inputs = torch.randn(2, 3, 7)
    router.set_alpha(alpha)
    masks = median_gate(site.log_phi)
    rows = []
    for example, weights in zip(inputs, alpha, strict=True):
        mixed = sum(weight * mask for weight, mask in zip(weights, masks, strict=True))
        rows.append(linear(example) + (mixed * example) @ site.delta.T)
    with torch.no_grad():
        found = site(inputs)
        assert relative_error(found, torch.stack(rows)) < 1e-6
        by_hand = [F.linear(inputs[row], site.folded(alpha[row]), linear.bias) for row in range(2)]
        assert relative_error(found, torch.stack(by_hand)) < 1e-6
        site.prune()
        router.set_alpha(alpha.clone())
        assert relative_error(site(inputs), found) < 1e-6
        assert relative_error(F.linear(inputs[1], site.folded(alpha[1]), linear.bias), found[1]) < 1e-6
    assert (site.in_features, site.out_features, site.bias is None) == (7, 5, not bias)


@torch.no_grad()
def test_a_layer_may_be_on_another_device_than_the_router(trained: MakeModel) -> None:
    router = interpolation_of(trained())
    assert router is not None
    site = InterpolatedLinear(nn.Linear(7, 5), router, None).to("meta")
    for index in (None, torch.zeros(2, 3, dtype=torch.long)):
        router.set_alpha(torch.full((1, EXPERTS), 1 / EXPERTS), index)
        assert site(torch.randn(2, 3, 7, device="meta")).shape == (2, 3, 5)


@pytest.mark.parametrize("closed", ["all", "none", "one"])
def test_pruning_keeps_the_union_of_the_masks(closed: str, trained: MakeModel) -> None:
    router = interpolation_of(trained())
    assert router is not None
    site = InterpolatedLinear(nn.Linear(6, 5), router, None)
    nn.init.normal_(site.delta)
    with torch.no_grad():
        site.log_phi.fill_(-5 if closed == "all" else 5)
        if closed == "one":
            site.log_phi[:, 2] = -5
            site.log_phi[:-1, 3] = -5
    router.set_alpha(torch.full((1, EXPERTS), 1 / EXPERTS))
    inputs = torch.randn(1, 3, 6)
    with torch.no_grad():
        before = site(inputs)
        kept = {"all": [], "none": [0, 1, 2, 3, 4, 5], "one": [0, 1, 3, 4, 5]}[closed]
        site.prune()
        router.set_alpha(torch.full((1, EXPERTS), 1 / EXPERTS))
        assert site.columns.tolist() == kept
        assert site.delta.shape == (5, len(kept))
        assert torch.allclose(site(inputs), before, atol=1e-6)


# A whole model.


@pytest.mark.parametrize("family", sampled(DENSE_FAMILIES, DENSE_STRUCTURES))
def test_every_family_starts_as_the_dense_model(family: str, fresh: MakeModel) -> None:
    model, dense = load(fresh(family)), dense_of(fresh, family)
    assert logits(model).equal(logits(dense))
    linears = {
        name
        for name, module in dense.named_modules()
        if isinstance(module, nn.Linear) and any(part.isdigit() for part in name.split("."))
    }
    assert sites(model).keys() == linears
    options = dict(GENERATE, attention_mask=torch.ones(2, 6, dtype=torch.long))
    tokens = prompt(2, 6)
    assert model.generate(tokens, **options).equal(dense.generate(tokens, **options))


@families_and_pruned
def test_every_family_is_its_folded_weights(family: str, pruned: bool, fresh: MakeModel, trained: MakeModel) -> None:
    """One α for all layers and tokens of a row, from what the dense model makes of its first token."""
    model, dense = trained(family, pruned=pruned), dense_of(fresh, family)
    found = logits(model)
    alpha = alpha_of(model)
    with torch.no_grad():
        seen = dense.base_model(input_ids=prompt()[:, :1], use_cache=False).last_hidden_state[:, 0]
    assert torch.allclose(alpha, routed(model, seen), atol=1e-5)
    assert (alpha[0] - alpha[1]).abs().max() > 0.01
    for row in range(2):
        expected = logits(folded(dense, model, alpha[row]), prompt()[row : row + 1])
        assert relative_error(found[row : row + 1], expected) < 1e-5
    assert relative_error(found, logits(dense)) > 0.01


def test_scoring_depends_on_the_first_token_alone(trained: MakeModel) -> None:
    model, tokens = trained(), prompt()
    logits(model, tokens)
    before = alpha_of(model)
    changed = tokens.clone()
    changed[:, 1:] = (tokens[:, 1:] + 7) % 280 + 1
    logits(model, changed)
    assert alpha_of(model).equal(before)
    changed[:, 0] = (tokens[:, 0] + 7) % 280 + 1
    logits(model, changed)
    assert not alpha_of(model).equal(before)


def test_scoring_a_padded_batch_gives_what_each_text_alone_gives(trained: MakeModel) -> None:
    model, tokens = trained(), prompt(1, 9)
    alone = logits(model, tokens)[0]
    for side in ("left", "right"):
        padded, mask = torch.zeros(2, 12, dtype=torch.long), torch.zeros(2, 12, dtype=torch.long)
        place = slice(3, 12) if side == "left" else slice(0, 9)
        padded[0, place], mask[0, place] = tokens[0], 1
        padded[1], mask[1] = prompt(1, 12)[0], 1
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        for options in ({"position_ids": positions}, {"position_ids": positions.masked_fill(mask == 0, 1)}):
            with torch.no_grad():
                found = model(input_ids=padded, attention_mask=mask, use_cache=False, **options).logits[0, place]
            assert relative_error(found, alone) < 1e-5


def batch_of(*rows: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Rows of (prompt, answer) pairs, as training packs them."""
    return collate(
        [
            [
                Example((*asked.tolist(), *told.tolist()), (*[IGNORED] * len(asked), *told.tolist()))
                for asked, told in row
            ]
            for row in rows
        ]
    )


def score(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits and α of a batch of the training."""
    router = interpolation_of(model)
    assert router is not None
    router.prompt_ends = batch["prompt_ends"]
    found = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    assert router.prompt_ends is None
    return found, alpha_of(model)


def pairs(*lengths: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [
        (
            torch.randint(1, 288, (lengths[i],), generator=draw),
            torch.randint(1, 288, (lengths[i + 1],), generator=draw),
        )
        for i in range(0, len(lengths), 2)
    ]


@pytest.mark.parametrize("family", ["llama", "opt", "youtu"])
def test_rows_of_a_batch_score_as_each_does_alone(family: str, trained: MakeModel) -> None:
    """Also where layers get all tokens one after the other (OPT), or heads beside the batch (latent attention)."""
    model, texts = trained(family), 1 + torch.arange(21).view(3, 7) ** 2 % 280
    with torch.no_grad():
        alone = torch.cat([logits(model, text[None]) for text in texts])
        assert relative_error(logits(model, texts), alone) < 1e-5
        packed = {"input_ids": texts.view(1, -1), "position_ids": torch.arange(7).repeat(3)[None], "use_cache": False}
        if family != "opt":  # whose attention does not tell texts in one row apart
            assert relative_error(model(**packed).logits.view_as(alone), alone) < 1e-5


@torch.no_grad()
def test_answers_do_not_change_the_mixture(trained: MakeModel) -> None:
    model = trained()
    first = pairs(4, 3, 5, 2)
    _, before = score(model, batch_of(first, pairs(8, 4)))
    other = [(asked, (told + 11) % 280 + 1) for asked, told in first]
    _, after = score(model, batch_of(other, [(pairs(8, 4)[0][0], (pairs(8, 4)[0][1] + 5) % 280 + 1)]))
    assert after.equal(before)
    asked = first[1][0].clone()
    asked[-1] = asked[-1] % 280 + 1
    _, elsewhere = score(model, batch_of([first[0], (asked, first[1][1])], pairs(8, 4)))
    assert elsewhere[0].equal(before[0])
    assert not torch.allclose(elsewhere[1], before[1], atol=1e-4)


@torch.no_grad()
def test_packed_examples_have_mixtures_of_their_own(trained: MakeModel, fresh: MakeModel) -> None:
    """As many as there are examples, in their order, those of padding included, each as if it were alone."""
    model, dense = trained(), dense_of(fresh)
    row, short = pairs(4, 3, 5, 2, 3, 6), pairs(6, 4)
    packed, alphas = score(model, batch_of(row, short))
    assert alphas.shape == (5, EXPERTS)
    start = 0
    for number, (asked, told) in enumerate(row):
        alone, alpha = score(model, batch_of([(asked, told)]))
        seen = dense.model(input_ids=asked[None], use_cache=False).last_hidden_state[:, -1]
        assert torch.allclose(alpha, routed(model, seen), atol=1e-5)
        assert torch.allclose(alphas[number], alpha[0], atol=1e-5)
        stop = start + len(asked) + len(told)
        assert relative_error(packed[0, start:stop], alone[0]) < 1e-5
        start = stop
    alone, alpha = score(model, batch_of(short))
    assert torch.allclose(alphas[3], alpha[0], atol=1e-5)
    assert relative_error(packed[1, :10], alone[0]) < 1e-5


# Generation.


@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_bigcode", "falcon", "gpt_neox", "phi3", "qwen2-windows"])
def test_generation_keeps_the_mixture_of_the_whole_prompt(
    family: str, pruned: bool, fresh: MakeModel, trained: MakeModel
) -> None:
    model, dense, tokens = trained(family, pruned=pruned), dense_of(fresh, family), prompt(1, 7)
    router = interpolation_of(model)
    assert router is not None
    chosen = []
    before = router.choose
    router.choose = lambda hidden: chosen.append(before(hidden)) or chosen[-1]  # type: ignore[method-assign]
    found = model.generate(tokens, attention_mask=torch.ones_like(tokens), return_dict_in_generate=True, **GENERATE)
    assert len(chosen) == 1
    assert alpha_of(model) is chosen[0]
    with torch.no_grad():
        seen = dense.base_model(input_ids=tokens, use_cache=False).last_hidden_state[:, -1]
    assert torch.allclose(chosen[0], routed(model, seen), atol=1e-5)
    whole = folded(dense, model, chosen[0][0])
    assert found.sequences.equal(whole.generate(tokens, attention_mask=torch.ones_like(tokens), **GENERATE))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_bigcode", "falcon", "phi"])
@pytest.mark.parametrize("beams", [1, 3])
def test_a_left_padded_batch_generates_what_each_prompt_alone_does(family: str, beams: int, trained: MakeModel) -> None:
    model = trained(family)
    prompts = [prompt(1, 9)[0], prompt(1, 24)[0, 12:17]]
    padded, mask = torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 9, dtype=torch.long)
    for row, tokens in enumerate(prompts):
        padded[row, 9 - len(tokens) :], mask[row, 9 - len(tokens) :] = tokens, 1
    together = model.generate(padded, attention_mask=mask, num_beams=beams, **GENERATE)
    for row, tokens in enumerate(prompts):
        alone = model.generate(
            tokens[None], attention_mask=torch.ones(1, len(tokens), dtype=torch.long), num_beams=beams, **GENERATE
        )
        assert together[row, 9:].equal(alone[0, len(tokens) :])


def decode(model: Any, tokens: Tensor, steps: int = FOLDING + 2) -> tuple[Tensor, Any]:
    """Logits `[batch, steps, vocabulary]` of the same tokens one by one after a prompt, and the cache."""
    with torch.no_grad():
        cache = cache_of(model(input_ids=tokens, use_cache=True))
        found = [
            model(input_ids=torch.full((len(tokens), 1), 9 + step), **{CACHE: cache}).logits for step in range(steps)
        ]
    return torch.cat(found, 1), cache


def folded_by(model: Any) -> int:
    """How many weights are folded."""
    router = interpolation_of(model)
    assert router is not None
    return router.mixture.folded if router.mixture else 0


@families_and_pruned
def test_weights_that_are_folded_decode_the_same(family: str, pruned: bool, trained: MakeModel) -> None:
    model, tokens = trained(family, pruned=pruned), prompt(1, 7).expand(2, -1)
    router = interpolation_of(model)
    assert router is not None
    found, _ = decode(model, tokens)
    assert folded_by(model) == len(sites(model))
    router.folds = False
    expected, _ = decode(model, tokens)
    assert folded_by(model) == 0
    assert relative_error(found, expected) < 1e-5
    assert not found.equal(expected)


def test_weights_are_folded_only_where_it_pays_and_is_right(trained: MakeModel) -> None:
    model, one, two = trained(), prompt(1, 7), prompt(2, 7)
    decode(model, two)
    assert folded_by(model) == 0  # two prompts, two mixtures
    decode(model, one, FOLDING - 1)
    assert folded_by(model) == 0
    (_, first), (_, second) = decode(model, one), decode(model, two[1:])
    assert folded_by(model) == len(sites(model))
    with torch.no_grad():
        for cache in (first, second) * FOLDING:
            model(input_ids=one[:, :1], **{CACHE: cache})
            assert folded_by(model) == 0


class Adapted(nn.Linear):
    """A linear layer with something added, as peft adds it."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + 0.1 * inputs.sum(-1, keepdim=True)


def test_linear_layers_that_compute_something_else_are_not_folded(trained: MakeModel) -> None:
    model, tokens = trained(), prompt(1, 7)
    plain, _ = decode(model, tokens)
    for site in sites(model).values():
        site.linear.__class__ = Adapted
    found, _ = decode(model, tokens)
    assert folded_by(model) == 0
    router = interpolation_of(model)
    assert router is not None
    router.folds = False
    assert found.equal(decode(model, tokens)[0])
    assert all(relative_error(found[:, step], plain[:, step]) > 0.01 for step in range(FOLDING + 2))


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}])
def test_beams_and_samples_of_one_prompt_share_folded_weights(options: dict[str, Any], trained: MakeModel) -> None:
    model, tokens, found = trained(), prompt(1, 7), []
    router = interpolation_of(model)
    assert router is not None
    for folds in (True, False):
        router.folds = folds
        torch.manual_seed(5)
        given = {**GENERATE, "max_new_tokens": FOLDING + 8, **options}
        found.append(model.generate(tokens, attention_mask=torch.ones_like(tokens), **given))
        assert bool(folded_by(model)) is folds
    assert found[0].equal(found[1])


def test_folded_weights_go_with_their_prompt_and_are_no_part_of_the_model(trained: MakeModel) -> None:
    model, tokens = trained(), prompt(1, 7)
    before = model.state_dict()
    _, cache = decode(model, tokens)
    assert folded_by(model) == len(sites(model))
    assert model.state_dict().keys() == before.keys()
    model.train()
    assert folded_by(model) == 0
    model.eval()
    decode(model, tokens)
    with torch.no_grad():
        model(input_ids=tokens, use_cache=True)
    assert folded_by(model) == 0
    _, cache = decode(model, tokens)
    with torch.enable_grad():
        assert model(input_ids=tokens[:, :1], **{CACHE: cache}).logits.requires_grad


def test_weights_that_change_are_folded_anew(trained: MakeModel) -> None:
    model, tokens = trained(), prompt(1, 7)
    _, cache = decode(model, tokens)
    router = interpolation_of(model)
    assert router is not None
    with torch.no_grad():
        for site in sites(model).values():
            site.delta.mul_(2)
        again = copy.deepcopy(cache)  # which takes α with it, and no folded weights
        found = model(input_ids=tokens[:, :1], **{CACHE: cache}).logits
        router.folds = False
        assert relative_error(found, model(input_ids=tokens[:, :1], **{CACHE: again}).logits) < 1e-5


@contextlib.contextmanager
def side_by_side(model: Any, threads: int) -> Iterator[None]:
    """No thread enters the second layer before all others have come there, too: their calls overlap, every one."""
    barrier = threading.Barrier(threads)

    def wait(*_: Any) -> None:
        barrier.wait(20)

    handle = model.model.layers[1].register_forward_pre_hook(wait)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("folds", [True, False])
def test_threads_generate_what_they_do_alone(folds: bool, trained: MakeModel) -> None:
    model = trained()
    router = interpolation_of(model)
    assert router is not None
    router.folds = folds
    given = {**GENERATE, "max_new_tokens": FOLDING + 4, "output_scores": True, "return_dict_in_generate": True}
    prompts = prompt(3, 7).unsqueeze(1)

    def told(tokens: Tensor) -> Tensor:
        return torch.stack(model.generate(tokens, attention_mask=torch.ones_like(tokens), **given).scores)

    alone = [told(tokens) for tokens in prompts]
    assert not alone[0].allclose(alone[1], atol=1e-2)
    with ThreadPoolExecutor(3) as pool, side_by_side(model, 3):
        together = list(pool.map(told, prompts))
    assert all(found.equal(expected) for found, expected in zip(together, alone, strict=True))


@torch.no_grad()
def test_threads_score_and_freeze_what_they_do_alone(trained: MakeModel) -> None:
    """One a batch with prompts of its own, one a text, one the frozen model."""
    model, tokens = trained(), prompt(2, 12)
    router = interpolation_of(model)
    assert router is not None

    def batch() -> Tensor:
        return score(model, batch_of(pairs(4, 3, 5, 2)))[0]

    def text() -> Tensor:
        return logits(model, tokens)

    def frozen() -> Tensor:
        with router.frozen():
            model(input_ids=tokens, use_cache=False)
            return logits(model, tokens)

    jobs = [batch, text, frozen]
    alone = [job() for job in jobs]
    with ThreadPoolExecutor(3) as pool, side_by_side(model, 3):
        together = [one.result() for one in [pool.submit(torch.no_grad()(job)) for job in jobs]]
    assert all(found.equal(expected) for found, expected in zip(together, alone, strict=True))
    assert router.prompt_ends is None


def test_activations_that_another_thread_recomputes(trained: MakeModel) -> None:
    """As autograd does on some devices; of several trainings it cannot know which one it works for."""
    model, tokens = trained(), prompt(2, 12)
    site, router = sites(model)["model.layers.1.mlp.up_proj"], interpolation_of(model)
    assert router is not None
    inputs = torch.randn(2, 12, 32)
    with ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(1) as other:
        pool.submit(model, input_ids=tokens, use_cache=False).result()
        alpha = pool.submit(lambda: router.alpha).result()
        found = other.submit(site, inputs).result()
        router.set_alpha(alpha)
        assert found.equal(site(inputs))
        with pytest.raises(RuntimeError, match="2 threads train this model at once"):
            other.submit(site, inputs).result()


@torch.inference_mode()
def test_weights_of_inference_mode_are_folded(trained: MakeModel) -> None:
    model = trained()
    found, _ = decode(model, prompt(1, 7))
    assert folded_by(model) == len(sites(model))
    interpolation_of(model).folds = False  # type: ignore[union-attr]
    assert relative_error(found, decode(model, prompt(1, 7))[0]) < 1e-5


@pytest.mark.parametrize("options", [{"cache_implementation": "static"}, {"num_return_sequences": 2, "num_beams": 2}])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_other_ways_to_generate(family: str, options: dict[str, Any], trained: MakeModel) -> None:
    model, tokens = trained(family), prompt(2, 7)
    whole = {"attention_mask": torch.ones_like(tokens), **GENERATE}
    expected = model.generate(tokens, **whole, num_beams=options.get("num_beams", 1))
    found = model.generate(tokens, **whole, **options)
    assert found[:: options.get("num_return_sequences", 1)].equal(expected)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("length", [6, 12])
def test_a_padded_batch_in_a_cache_of_fixed_size(family: str, length: int, trained: MakeModel) -> None:
    """Attention masks are prepared before the model sees them."""
    model, tokens = trained(family), prompt(2, length)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    expected = model.generate(tokens, attention_mask=mask, **GENERATE)
    assert model.generate(tokens, attention_mask=mask, cache_implementation="static", **GENERATE).equal(expected)


@pytest.mark.parametrize("family", ["llama", "falcon"])
def test_embeddings_instead_of_tokens(family: str, trained: MakeModel) -> None:
    model, tokens = trained(family), prompt(2, 7)
    with torch.no_grad():
        embedded = model.get_input_embeddings()(tokens)
        found = model(inputs_embeds=embedded, use_cache=False).logits
    assert relative_error(found, logits(model, tokens)) < 1e-6


def test_a_cache_that_another_model_began_is_refused(fresh: MakeModel, trained: MakeModel) -> None:
    model, tokens = trained(), prompt(1, 6)
    with torch.no_grad():
        cache = cache_of(dense_of(fresh)(input_ids=tokens, use_cache=True))
        with pytest.raises(RuntimeError, match="not begun by this model"):
            model(input_ids=tokens[:, :1], **{CACHE: cache})


def test_the_frozen_model_leaves_no_trace(trained: MakeModel) -> None:
    model, tokens = trained(), prompt()
    router = interpolation_of(model)
    assert router is not None
    model.train()
    model.model.layers[1].eval()
    before = {name: module.training for name, module in model.named_modules()}
    first = model(input_ids=tokens, use_cache=False).logits
    assert {name: module.training for name, module in model.named_modules()} == before
    with router.frozen():
        assert router.mixed(sites(model)["model.layers.0.mlp.up_proj"], first) is None
    with pytest.raises(RuntimeError, match="on purpose"), router.frozen():
        raise RuntimeError("on purpose")
    assert model(input_ids=tokens, use_cache=False).logits.equal(first)
    assert first.requires_grad


# Training.


def trained_gradients(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    model.requires_grad_(False)
    for module in model.modules():
        if hasattr(module, "expert_parameters"):
            for parameter in module.expert_parameters():
                parameter.requires_grad_(True)
    found, _ = score(model, batch)
    F.cross_entropy(found[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED).backward()
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt_bigcode"])
def test_the_first_gradient_lies_in_the_differences_alone(family: str, fresh: MakeModel) -> None:
    gradients = trained_gradients(load(fresh(family)).train(), batch_of(pairs(4, 6)))
    for name, gradient in gradients.items():
        assert bool(gradient.any()) is name.endswith(".delta"), name


def test_later_all_of_it_learns(trained: MakeModel) -> None:
    gradients = trained_gradients(trained().train(), batch_of(pairs(4, 6), pairs(9, 3)))
    assert all(gradient.any() for gradient in gradients.values())
    assert {name.rpartition(".")[2] for name in gradients} == {"delta", "log_phi", "weight", "bias"}


@pytest.mark.parametrize("samples", [False, True])
def test_recomputed_activations_give_the_same_gradients(samples: bool, trained: MakeModel) -> None:
    found = []
    for recompute in (False, True):
        model = trained().train()
        interpolation_of(model).samples = samples  # type: ignore[union-attr]
        if recompute:
            recompute_activations(model)
        torch.manual_seed(4)
        found.append(trained_gradients(model, batch_of(pairs(4, 6, 3, 2), pairs(9, 3))))
    for name, gradient in found[0].items():
        assert relative_error(found[1][name], gradient) < 1e-5, name


def test_gates_are_drawn_only_if_asked_and_only_while_training(trained: MakeModel) -> None:
    model = trained()
    router = interpolation_of(model)
    assert router is not None
    medians = logits(model.train())
    assert logits(model).equal(medians)
    router.samples = True
    assert not logits(model).equal(logits(model))
    assert logits(model.eval()).equal(medians)


def test_weights_that_changed_between_two_texts_are_seen(trained: MakeModel) -> None:
    model = trained()
    before = logits(model)
    with torch.no_grad():
        for site in sites(model).values():
            site.log_phi.fill_(-9.0)
    assert not logits(model).equal(before)
    assert closed_share(model) == 1


# What is told of masks.


def test_shares_and_overlap_by_hand(trained: MakeModel) -> None:
    model = trained()
    masks = {name: site.log_phi.detach().double() for name, site in sites(model).items()}
    everything = torch.cat([mask.flatten() for mask in masks.values()])
    assert open_share(model).item() == pytest.approx(torch.sigmoid(everything + 1.598597).mean().item(), abs=1e-6)
    assert closed_share(model) == pytest.approx((everything <= -SHIFT).double().mean().item(), abs=1e-9)
    total = torch.zeros(EXPERTS, EXPERTS, dtype=torch.float64)
    for mask in masks.values():
        gates = median_gate(mask)
        for one in range(EXPERTS):
            for other in range(EXPERTS):
                total[one, other] += (gates[one] * gates[other]).sum() * (one != other)
    assert overlap_penalty(model).item() == pytest.approx(total.square().sum().sqrt().item(), rel=1e-5)


def test_masks_that_share_nothing_have_no_penalty_and_a_finite_gradient(trained: MakeModel) -> None:
    model = trained()
    with torch.no_grad():
        for site in sites(model).values():
            site.log_phi.fill_(-9.0)
            for expert in range(EXPERTS):
                site.log_phi[expert, expert::EXPERTS] = 0.5
    penalty = overlap_penalty(model)
    penalty.backward()
    assert penalty.item() == 0
    assert all(torch.isfinite(site.log_phi.grad).all() for site in sites(model).values())


def test_equal_weights_for_all(fresh: MakeModel, trained: MakeModel) -> None:
    model = trained()
    weigh_equally(model)
    expected = folded(dense_of(fresh), model, torch.full((EXPERTS,), 1 / EXPERTS))
    assert relative_error(logits(model), logits(expected)) < 1e-5


# In transformers.


@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "phi3", "gpt_bigcode"])
def test_saving_gives_back_the_same_model(family: str, pruned: bool, trained: MakeModel, tmp_path: Path) -> None:
    model = trained(family, pruned=pruned)
    with quiet():
        model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert logits(again).equal(logits(model))
    assert again.state_dict().keys() == model.state_dict().keys()
    router = interpolation_of(again)
    assert router is not None
    assert router.trains_masks is not pruned


def test_no_channel_need_be_left(fresh: MakeModel, tmp_path: Path) -> None:
    model = load(fresh("llama"))
    router = interpolation_of(model)
    assert router is not None
    for site in sites(model).values():
        nn.init.constant_(site.log_phi, -9.0)
        site.prune()
    del router.multiplier
    spec = SimoeSpec.from_config(model.config.quantization_config.interpolated)
    with quiet():
        model.save_pretrained(tmp_path)
    model.config.quantization_config = custom_entry(spec.settled(dict.fromkeys(sites(model), 0)))
    model.config.save_pretrained(tmp_path)
    assert logits(load(tmp_path)).equal(logits(dense_of(fresh)))


def test_a_copy_is_a_model_of_its_own(trained: MakeModel) -> None:
    model = trained()
    before = logits(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        interpolation_of(twin).second.bias[0] += 3  # type: ignore[union-attr]
    assert not logits(twin).equal(before)
    assert logits(model).equal(before)


def test_the_bare_decoder(trained: MakeModel, tmp_path: Path) -> None:
    model = trained()
    with quiet():
        model.save_pretrained(tmp_path)
    decoder = load(tmp_path, AutoModel)
    with torch.no_grad():
        found, expected = (one(input_ids=prompt()).last_hidden_state for one in (decoder, model.model))
    assert found.equal(expected)


def test_half_precision(trained: MakeModel, tmp_path: Path) -> None:
    model = trained()
    with quiet():
        model.save_pretrained(tmp_path)
    half = load(tmp_path, dtype=torch.bfloat16)
    assert relative_error(logits(half), logits(model)) < 0.1
    tokens = prompt(2, 6)
    found = half.generate(tokens, attention_mask=torch.ones_like(tokens), **GENERATE)
    assert found.shape == (2, 12)
