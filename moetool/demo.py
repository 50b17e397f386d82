"""A small Mixtral, trained for real in about a minute, on a text that every Python brings along.

The text is Python's own language reference, as `pydoc_data.topics` holds it. Every eighth topic is held out. Experts
start as copies of one another, as upcycled experts do, and part ways in training.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moetool.integrations.quiet import quiet
from moetool.pipeline.progress import Progress, phase

VOCABULARY = 2048
LENGTH = 128
BATCH = 16
STEPS = 220
LEARNING_RATE = 4e-3
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}


def write_texts(directory: Path) -> tuple[Path, Path]:
    """Write `train.txt` and `held-out.txt`; returns their paths."""
    from pydoc_data.topics import topics

    directory.mkdir(parents=True, exist_ok=True)
    ordered = [topics[name] for name in sorted(topics)]
    train, held_out = directory / "train.txt", directory / "held-out.txt"
    train.write_text("\n\n".join(text for i, text in enumerate(ordered) if i % 8), encoding="utf-8")
    held_out.write_text("\n\n".join(text for i, text in enumerate(ordered) if i % 8 == 0), encoding="utf-8")
    return train, held_out


def train_tokenizer(text: Path) -> Any:
    """A byte-level BPE tokenizer of `VOCABULARY` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text.read_text(encoding="utf-8")], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")


def build_model(seed: int) -> Any:
    """A Mixtral whose experts are equal."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
        bos_token_id=0,
        eos_token_id=0,
        **SIZES,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MixtralForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                weight.copy_(weight[:1].expand_as(weight).clone())
    return model


def batches(tokens: Tensor, steps: int, seed: int) -> Iterator[Tensor]:
    """`steps` batches `[BATCH, LENGTH]` of random windows."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - LENGTH, (BATCH, 1), generator=generator)
        yield tokens[starts + torch.arange(LENGTH)]


def train(model: Any, tokens: Tensor, steps: int, seed: int, progress: Progress) -> None:
    """AdamW with a linear warm-up and a linear way down to zero."""
    model.train()
    warmup = max(1, steps // 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / (steps - warmup))
    )
    with phase(progress, "Train", steps):
        for batch in batches(tokens, steps, seed):
            loss = model(input_ids=batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            progress.advance()
    model.eval()


def make_model(directory: Path, steps: int, seed: int, progress: Progress) -> tuple[Path, Path, Path]:
    """Train and save a model; returns its directory, its training text and the held-out text."""
    train_text, held_out = write_texts(directory)
    tokenizer = train_tokenizer(train_text)
    tokens = torch.tensor(tokenizer(train_text.read_text(encoding="utf-8"), verbose=False)["input_ids"])
    model = build_model(seed)
    train(model, tokens, steps, seed, progress)
    model.config.output_router_logits = False
    path = directory / "mixtral"
    with quiet():
        model.to(torch.bfloat16).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return path, train_text, held_out
