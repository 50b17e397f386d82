"""A model family as llama.cpp computes it: names of tensors in a checkpoint and in a GGUF file, and metadata.

Sources: https://github.com/ggml-org/llama.cpp (`conversion/`, `src/models/`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moetool.architectures import ROLES, Architecture, Role
from moetool.format.gguf.changes import HEAD_NORMS, Change, Config
from moetool.format.gguf.words import HEAD, SHARED_EXPERT, WIDTH, layer_in_file, layer_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Setting = int | float | bool
Metadata = Mapping[str, Any]

ATTENTION: Mapping[str, str] = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": HEAD,
}
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    **{f"self_attn.{module}.weight": f"{name}.weight" for module, name in ATTENTION.items()},
}
_ROOT, _LAYERS = "model.", "model.layers.{layer}"
_CHOICE_BIAS = "exp_probs_b.bias"


def nothing(_: object) -> None:
    """What is said of a config against which nothing speaks."""


def _key_heads(config: "PreTrainedConfig") -> int:
    """Return the number of heads of keys, that of queries where a config does not say."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def under(layer: str, name: str) -> str:
    """A tensor's name in a checkpoint whose language model lies in another model, or is not called `model`; `layer` is
    the prefix of its layers' tensors."""
    inside = _LAYERS.removeprefix(_ROOT)
    root = layer.removesuffix(inside) if layer.endswith(inside) else _ROOT
    if name.startswith(_ROOT):
        return root + name.removeprefix(_ROOT)
    return root.removesuffix(_ROOT) + name if root.endswith(f".{_ROOT}") else name


def beside(module: str) -> dict[str, str]:
    """Names of the matrices of a shared expert that nothing else of moetool knows as one."""
    return {f"{module}.{role}_proj.weight": own for role, own in SHARED_EXPERT.items()}


def without_experts(module: str) -> dict[str, str]:
    """Names of the matrices of a feed-forward network without experts, which lies in this module of a layer."""
    return {f"{module}.{role}_proj.weight": f"ffn_{role}.weight" for role in ROLES}


@dataclass(frozen=True)
class GgufFamily:
    """A family as llama.cpp computes it.

    Attributes:
        model_type: of `config.json`.
        architecture: llama.cpp's name.
        is_moe: whether it has layers with experts.
        leads_dense: whether its first layers may have no experts.
        mixes_layers: whether any layers may have no experts.
        skips_experts: whether layers have either experts or attention or a state, not two of them.
        varies_heads: whether a file says how many heads of keys each layer has; none, if it has no attention.
        kinds_by_heads: words (`layer_types`) for layers that have no heads of keys, and for those that have some.
        attention_interval: metadata key of how many layers there are for one with attention, if they take turns.
        attends_beside_states: whether every layer has attention and a state.
        has_states: whether a file says which layers have a state in the place of attention.
        is_interleaved: whether rotary embeddings turn neighbouring rows of a head's queries and keys, where
            transformers turns rows that are half a head apart.
        slows_rope: whether a file may say by how much each pair of channels turns slower (Llama 3's `rope_type`).
        has_long_rope: whether a file may say so of short texts and of long ones (LongRoPE).
        stretches_rope: whether their base may be stretched for long texts (Hunyuan's `dynamic` with `alpha`).
        is_partial: whether they may turn a part of each head only.
        axes: how many pairs of a head's channels turn by time, height and width of a picture, if a config does not say;
            of a text all are the same.
        has_deep_stack: whether layers are given more of a picture.
        has_two_widths: whether heads are wider in layers that attend to all of a text, and rotary embeddings turn a
            share of them there (Gemma 4).
        is_latent: whether keys and values come from one small vector per token (DeepSeek's MLA).
        weighs_scores: whether a file may say by how much YaRN multiplies their scores.
        is_lite_by_layers: whether llama.cpp tells by the number of layers if queries come from a small vector, too.
        has_head_norms: whether queries and keys have norms.
        is_square: whether heads have to add up to the hidden size.
        key_heads: tells of a config how many heads of keys most layers have.
        groups_heads: whether there may be fewer heads of keys than of queries.
        groups_experts: whether a token's experts may be taken from some groups of them.
        has_shared: whether it may have a shared expert.
        may_lack_shared: whether llama.cpp computes it without a shared expert, too.
        shared: names of the shared expert's matrices; those of one name lie below each other, as in the checkpoint.
        biases: attention modules that may have one.
        may_tie: whether transformers ties embeddings where a config says so.
        needs_head: whether tied embeddings have to be there a second time, as the output matrix.
        experts_key: config key of the number of experts.
        width_key: metadata key of the experts' width.
        shared_width: config key of the shared expert's, if there is one.
        dense_width: config key of the width of layers without experts.
        window_period: layers of which the last attends to all of a text and the others to a window of it; 0 if a file
            says so layer by layer, `None` if llama.cpp knows no windows here.
        sees_windows: whether every layer attends to a window, whatever it attends to beside it.
        needs_windows: whether llama.cpp loads no model without one.
        turns_by_layer: whether a file says which layers have rotary embeddings (Granite's `layer_rope_theta`).
        windows_turn_alike: whether rotary embeddings have the same base in layers with a window as in the others.
        is_indexed: whether a file says layer by layer which have an indexer: those that attend to all of a text.
        turns_shares: whether they may turn another share of a head there, if the first layer attends to all of a text.
        doubles_turned: whether a file says twice how many channels they turn in layers that attend to all of a text.
        layer: prefix of a layer of a dense model.
        names: tensors of a layer beside those that nearly all families have, or under other names here.
        of_kinds: further ones of layers of a kind (`layer_types`), where those of another have something else there.
        outside: tensors outside of layers, likewise.
        modules: where transformers holds what has another name in a checkpoint: beginnings of paths in a layer.
        dense: matrices of a layer without experts.
        changes: tensors of a layer that a file has otherwise.
        former: names of tensors of a layer in early files, and those of a checkpoint.
        without: by tensors of a layer in a file, names of others where it has none of these.
        scaled: tensors that a file has multiplied, without their layer, and what tells of a config by which number, or
            by which of each row.
        counts: further whole numbers, config keys and metadata keys, as `COUNTS`.
        multipliers: further fractions, as `FRACTIONS`.
        of_layers: further fractions of each layer, 0 where a config has none.
        flags: further entries that are true or false.
        products: metadata keys of whole numbers, each the product of two entries.
        derived: metadata keys of numbers or lists, and what makes each of the config; `None` is not written.
        of_whole: entries of the config of a whole model that sees, too, and metadata keys of whole numbers.
        constants: tensors of a layer, whole numbers all, that metadata holds, and its keys.
        numbers: tensors of a layer, one number each, of which metadata hold those of all layers; its keys, and shapes.
        joined: beginnings of the names of tensors of a layer that a file has one below the other, outside of layers.
        around: beginnings of the names of tensors that lie beside the language model's own and are of no part of it.
        choices: metadata that says in numbers what entries say in words.
        fixed: metadata that every file of the family has.
        computes: config keys, and the values that llama.cpp computes, whatever a file says.
        told: entries of a config that a file's metadata tell in another way, and what makes each of these.
        implied: entries of a config that follow from its others in every model that llama.cpp computes, where
            transformers has another default.
        pieces: llama.cpp's name of a tokenizer of pieces.
        cutting: llama.cpp's name of how published tokenizers of the family cut a text, where their rules do not tell.
        objection: tells of a config why llama.cpp computes another model, if it does.
        remark: tells of a config in what llama.cpp differs a little, if it does.
        leaves_out: tensors of the layer, by beginnings of their names, that only an idle shared expert has.
    """

    model_type: str
    architecture: str
    is_moe: bool
    leads_dense: bool = False
    mixes_layers: bool = False
    skips_experts: bool = False
    varies_heads: bool = False
    kinds_by_heads: tuple[str, str] | None = None
    attention_interval: str | None = None
    attends_beside_states: bool = False
    has_states: bool = False
    is_interleaved: bool = False
    slows_rope: bool = False
    has_long_rope: bool = False
    stretches_rope: bool = False
    is_partial: bool = False
    axes: tuple[int, ...] = ()
    has_two_widths: bool = False
    has_deep_stack: bool = False
    is_latent: bool = False
    weighs_scores: bool = True
    is_lite_by_layers: bool = True
    has_head_norms: bool = False
    is_square: bool = False
    key_heads: Callable[["PreTrainedConfig"], int] = _key_heads
    groups_heads: bool = True
    groups_experts: bool = False
    has_shared: bool = False
    may_lack_shared: bool = False
    shared: Mapping[Role, str] = field(default_factory=lambda: SHARED_EXPERT)
    biases: tuple[str, ...] = ()
    may_tie: bool = True
    needs_head: bool = False
    experts_key: str = "num_local_experts"
    width_key: str = WIDTH
    shared_width: str | None = None
    dense_width: str = "intermediate_size"
    window_period: int | None = None
    sees_windows: bool = False
    needs_windows: bool = False
    turns_by_layer: bool = False
    windows_turn_alike: bool = False
    is_indexed: bool = False
    turns_shares: bool = False
    doubles_turned: bool = False
    layer: str = _LAYERS
    names: Mapping[str, str] = field(default_factory=dict)
    of_kinds: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    outside: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    dense: Mapping[str, str] = field(default_factory=lambda: without_experts("mlp"))
    changes: Mapping[str, Change] = field(default_factory=dict)
    former: Mapping[str, str] = field(default_factory=dict)
    without: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    scaled: Mapping[str, Callable[["PreTrainedConfig"], float | Tensor]] = field(default_factory=dict)
    counts: Mapping[str, str] = field(default_factory=dict)
    multipliers: Mapping[str, str] = field(default_factory=dict)
    of_layers: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    products: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    derived: Mapping[str, Callable[["PreTrainedConfig"], "Setting | Sequence[float] | None"]] = field(
        default_factory=dict
    )
    of_whole: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    joined: Mapping[str, str] = field(default_factory=dict)
    around: tuple[str, ...] = ()
    choices: Mapping[str, tuple[str, Mapping[object, Setting]]] = field(default_factory=dict)
    fixed: Mapping[str, Setting] = field(default_factory=dict)
    computes: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    told: Mapping[str, Callable[[Metadata], object]] = field(default_factory=dict)
    implied: Mapping[str, Callable[[Config], object]] = field(default_factory=dict)
    pieces: str = "llama"
    cutting: str | None = None
    objection: Callable[["PreTrainedConfig"], str | None] = nothing
    remark: Callable[["PreTrainedConfig"], str | None] = nothing
    leaves_out: tuple[str, ...] = ()

    def in_file(self, layers: int, moe: Architecture | None, layer: str | None, kinds: Sequence[str]) -> dict[str, str]:
        """Map the names of a checkpoint's tensors to those of GGUF, for all tensors but those of experts and `changes`.

        Args:
            layers: of the model.
            moe: its architecture, if it has experts.
            layer: prefix of its layers' tensors, if it is another than that of the family's dense models.
            kinds: of its layers, where these have names of their own (`of_kinds`).
        """
        mixing, prefix = range(layers) if moe is None else moe.moe_layers, layer or self.layer
        outside = {**_OUTSIDE, **self.outside}
        found = {under(prefix, name): own for name, own in outside.items() if own and name not in self.changes}
        for index in range(layers):
            inside = self._inside(moe if index in mixing else None)
            inside |= self.of_kinds.get(kinds[index], {}) if self.of_kinds else {}
            begin = prefix.format(layer=index) + "."
            found |= {begin + name: layer_in_file(index, own) for name, own in inside.items()}
        return found

    def changed(self, layers: Collection[int], layer: str | None = None) -> dict[str, tuple[Change, tuple[str, ...]]]:
        """The changes of tensors outside and in these layers by the checkpoint's names, with the file's names; `layer`
        as in `in_file`."""
        prefix, found = layer or self.layer, dict[str, tuple[Change, tuple[str, ...]]]()
        for name, change in self.changes.items():
            if name.startswith(_ROOT):
                found[under(prefix, name)] = change, change.names
                continue
            for index in layers:
                own = tuple(layer_in_file(index, own) for own in change.names)
                found[f"{prefix.format(layer=index)}.{name}"] = change, own
        return found

    def _inside(self, moe: Architecture | None) -> dict[str, str]:
        """Names in a layer, relative to it; with experts if `moe` is given."""
        inside = _LAYER | {f"self_attn.{module}.bias": f"{ATTENTION[module]}.bias" for module in self.biases}
        inside |= dict(HEAD_NORMS) if self.has_head_norms else {}
        if moe is None:
            inside |= dict(self.dense)
        else:
            inside[f"{moe.block}.{moe.router}".lstrip(".")] = "ffn_gate_inp.weight"
            inside |= dict.fromkeys(moe.router_others, _CHOICE_BIAS)
            if self.shared_width == "shared_expert_intermediate_size":
                inside["mlp.shared_expert_gate.weight"] = "ffn_gate_inp_shexp.weight"
        inside |= self.names
        return {name: own for name, own in inside.items() if name not in self.changes}

    def module_path(self, name: str) -> str:
        """The path in memory, relative to its layer, of the module with a weight of this name."""
        path = name.removesuffix(".weight")
        stem = next((stem for stem in self.modules if path.startswith(stem)), "")
        return self.modules.get(stem, "") + path.removeprefix(stem)

    def multiplied(
        self, name: str, config: "PreTrainedConfig", rows: Tensor, *, start: int = 0, power: int = 1
    ) -> Tensor:
        """Rows from `start` on of a tensor, named as in GGUF, times what multiplies them in a file, to a power."""
        make = self.scaled.get(name.removeprefix(layer_in_file(layer_of(name), "")))
        if make is None:
            return rows
        times = torch.as_tensor(make(config), dtype=torch.float32, device=rows.device) ** power
        own = times[start : start + len(rows)] if times.ndim else times
        return rows * own.view(-1, *(1 for _ in rows.shape[1:]))

    def turned_heads(self, name: str, heads: int, groups: int) -> int | None:
        """Heads whose rows lie in another order in a tensor of this (GGUF's) name; `None` if all lie as they were."""
        part = name.rpartition(".")[0].rpartition(".")[2]
        return {"attn_q": heads, "attn_k": groups}.get(part) if self.is_interleaved else None
