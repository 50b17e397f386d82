"""Train a small model from nothing on a text, for honest results on kinds of models that are not at hand.

    python scripts/train_small.py KIND TRAIN.txt[,MORE.txt] OUTPUT [--steps 600] [--seed 0]

KIND: gpt-neox has GELU, opt ReLU, bert is an encoder with GELU that learns to find hidden tokens. olmoe has 64 small
experts and takes 8 of them, granitemoe takes 4 of 16, qwen3-moe 8 of 128; qwen2-moe takes 2 of 8 and adds a shared
expert behind a gate; deepseek-v3 takes 4 of 32 by sigmoid routing, adds a shared expert, and its first layer is dense.
Mixtures learn with their family's load-balancing loss where transformers has one and are saved in bf16. The tokenizer
is trained on the same text. Minutes on a laptop; the same seed gives the same model.
"""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moetool.calibration.masking import SHARE

HIDDEN, LAYERS, HEADS, TOKENS = 256, 4, 8, 4096
SHARED = {
    "num_key_value_heads": HEADS // 2, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": 0, "router_aux_loss_coef": 0.02, "output_router_logits": True,
}  # fmt: skip
# Class, configuration and what the family has of its own, by kind.
MOE = {
    "olmoe": (OlmoeForCausalLM, OlmoeConfig, {
        "num_hidden_layers": LAYERS - 1, "intermediate_size": HIDDEN // 2, "num_experts": 64, "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    }),
    "granitemoe": (GraniteMoeForCausalLM, GraniteMoeConfig, {
        "intermediate_size": HIDDEN, "num_local_experts": 16, "num_experts_per_tok": 4,
        "attention_multiplier": (HIDDEN // HEADS) ** -0.5,
    }),
    "qwen2-moe": (Qwen2MoeForCausalLM, Qwen2MoeConfig, {
        "moe_intermediate_size": 3 * HIDDEN // 2, "shared_expert_intermediate_size": 3 * HIDDEN // 2,
        "num_experts": 8, "num_experts_per_tok": 2,
    }),
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {
        "num_hidden_layers": LAYERS - 1, "moe_intermediate_size": HIDDEN // 4, "num_experts": 128,
        "num_experts_per_tok": 8, "head_dim": HIDDEN // HEADS, "norm_topk_prob": True,
    }),
    "deepseek-v3": (DeepseekV3ForCausalLM, DeepseekV3Config, {
        "intermediate_size": 2 * HIDDEN, "moe_intermediate_size": HIDDEN // 2, "first_k_dense_replace": 1,
        "n_routed_experts": 32, "num_experts_per_tok": 4, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 1.0, "q_lora_rank": HIDDEN // 2, "kv_lora_rank": HIDDEN // 4,
        "qk_nope_head_dim": HIDDEN // HEADS, "qk_rope_head_dim": HIDDEN // HEADS // 2, "v_head_dim": HIDDEN // HEADS,
        "num_key_value_heads": HEADS,
    }),
}  # fmt: skip


def tokenizer_for(text: str, *, encoder: bool) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of the text's own words; an encoder's has marks for hidden tokens, beginning and end."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] if encoder else ["<|end|>"]
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    size = _vocabulary(encoder=encoder)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet)
    inner.train_from_iterator(text.splitlines(keepends=True), trainer)
    if not encoder:
        return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", bos_token="<|end|>")
    ids = [(mark, inner.token_to_id(mark)) for mark in ("[CLS]", "[SEP]")]
    inner.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def _vocabulary(*, encoder: bool) -> int:
    """Hidden tokens are hard to find for a model this small; less so if they are parts of words."""
    return 1024 if encoder else 4096


def build(kind: str) -> torch.nn.Module:
    """A fresh model."""
    common = {"vocab_size": _vocabulary(encoder=kind == "bert"), "hidden_size": HIDDEN, "num_hidden_layers": LAYERS}
    if kind == "bert":
        common["num_hidden_layers"] = LAYERS // 2
    common |= {"num_attention_heads": HEADS, "max_position_embeddings": 512}
    if kind in MOE:
        model, config, own = MOE[kind]
        return model(config(**common | SHARED | own))
    if kind == "gpt-neox":
        config = GPTNeoXConfig(
            **common, intermediate_size=4 * HIDDEN, hidden_act="gelu", bos_token_id=0, eos_token_id=0
        )
        return GPTNeoXForCausalLM(config)
    if kind == "opt":
        return OPTForCausalLM(
            OPTConfig(**common, ffn_dim=4 * HIDDEN, word_embed_proj_dim=HIDDEN, dropout=0.0, pad_token_id=0,
                      bos_token_id=0, eos_token_id=0)
        )  # fmt: skip
    return BertForMaskedLM(
        BertConfig(**common, intermediate_size=4 * HIDDEN, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=("gpt-neox", "opt", "bert", *MOE))
    parser.add_argument("text")
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    encoder = options.kind == "bert"
    text = "\n".join(Path(name).read_text() for name in options.text.split(","))
    tokenizer = tokenizer_for(text, encoder=encoder)
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    torch.manual_seed(options.seed)
    model, is_moe = build(options.kind), options.kind in MOE
    if is_moe:
        model.set_experts_implementation("grouped_mm")  # a loop over many small experts learns six times as slowly
    tokens = TOKENS // 2 if is_moe else TOKENS  # less text in a step, more steps in the same time
    length = 32 if encoder else 128
    rate = 5e-4 if encoder else 3e-3 if is_moe else 1.5e-3  # norms after each block bear no more
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=options.steps, pct_start=0.1)
    for step in range(options.steps):
        starts = torch.randint(0, len(ids) - length, (tokens // length,))
        rows = torch.stack([ids[start : start + length] for start in starts])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not is_moe):
            loss = _loss(model, rows, tokenizer)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step + 1 == options.steps:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    if is_moe:
        model.config.output_router_logits = False
        model.to(torch.bfloat16)
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)


def _loss(model: torch.nn.Module, rows: torch.Tensor, tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    if tokenizer.mask_token_id is None:
        result = model(input_ids=rows, use_cache=False)
        loss = F.cross_entropy(result.logits[:, :-1].float().flatten(0, 1), rows[:, 1:].flatten())
        return (
            loss
            if (balance := getattr(result, "aux_loss", None)) is None
            else loss + model.config.router_aux_loss_coef * balance
        )
    frame = [torch.full((len(rows), 1), mark) for mark in (tokenizer.cls_token_id, tokenizer.sep_token_id)]
    whole = torch.cat([frame[0], rows, frame[1]], dim=1)
    hidden = torch.rand(whole.shape) < 2 * SHARE  # more to learn from per step
    hidden[:, 0] = hidden[:, -1] = False
    logits = model(input_ids=whole.masked_fill(hidden, tokenizer.mask_token_id)).logits
    return F.cross_entropy(logits[hidden].float(), whole[hidden])


if __name__ == "__main__":
    main()
