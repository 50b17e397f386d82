"""The model of `moetool demo`: a small Llama, trained for half a minute on a text that every Python brings along.

The text is Python's own language reference, as `pydoc_data.topics` holds it. Every eighth topic is held out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moetool.checkpoint.permissions import open_to_readers
from moetool.job.progress import Progress, phase
from moetool.job.result import Printed
from moetool.quiet import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

VOCABULARY = 2048
LENGTH = 128
BATCH = 16
STEPS = 200
LEARNING_RATE = 4e-3
TUNING_RATE = 1e-3  # of what was trained before
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@dataclass(frozen=True)
class DemoModel(Printed):
    """A row of the demo's table: a model's directory, bytes of its weight files, held-out perplexity, and how it was
    made."""

    model: str
    bytes: int
    perplexity: float
    description: str


@dataclass(frozen=True)
class DemoResult(Printed):
    """Result of `moetool demo`: a row per model, and the seconds that all took."""

    models: Sequence[DemoModel]
    seconds: float


def write_texts(directory: Path) -> tuple[Path, Path]:
    """Write the demo's text, Python's own help topics, to `train.txt` and `held-out.txt` and return both paths."""
    from pydoc_data.topics import topics

    directory.mkdir(parents=True, exist_ok=True)
    ordered = [topics[name] for name in sorted(topics)]
    train, held_out = directory / "train.txt", directory / "held-out.txt"
    train.write_text("\n\n".join(text for i, text in enumerate(ordered) if i % 8), encoding="utf-8")
    held_out.write_text("\n\n".join(text for i, text in enumerate(ordered) if i % 8 == 0), encoding="utf-8")
    return train, held_out


def train_tokenizer(text: Path) -> "PreTrainedTokenizerBase":
    """Train a byte-level BPE tokenizer of `VOCABULARY` tokens on a text file."""
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


def build_model(seed: int) -> "PreTrainedModel":
    """Make the demo's Llama model with random weights that follow from the seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, **SIZES)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def batches(tokens: Tensor, steps: int, seed: int) -> Iterator[Tensor]:
    """Iterate over `steps` batches `[BATCH, LENGTH]` of windows at random places of a token stream."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - LENGTH, (BATCH, 1), generator=generator)
        yield tokens[starts + torch.arange(LENGTH)]


def train(
    model: "PreTrainedModel", tokens: Tensor, steps: int, rate: float, seed: int, progress: Progress, what: str
) -> None:
    """AdamW with a linear warm-up to `rate` and a linear way down to zero."""
    model.train()
    warmup = max(1, steps // 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
    )
    with phase(progress, what, steps, "steps"):
        for batch in batches(tokens, steps, seed):
            loss = model(input_ids=batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            progress.advance()
    model.eval()


def make_dense(directory: Path, steps: int, seed: int, progress: Progress) -> tuple[Path, Path, Path]:
    """Train and save a dense model; returns its directory, its training text and the held-out text."""
    train_text, held_out = write_texts(directory)
    tokenizer = train_tokenizer(train_text)
    model = build_model(seed)
    train(model, _tokens(tokenizer, train_text), steps, LEARNING_RATE, seed, progress, "Train")
    path = directory / "dense"
    _save(model, tokenizer, path)
    return path, train_text, held_out


def tune(source: Path, target: Path, text: Path, steps: int, seed: int, progress: Progress) -> None:
    """Train a saved model some steps more, on windows that it has not seen yet, and save it as `target`.

    An MoE model is trained with its family's load-balancing loss.
    """
    from transformers import AutoTokenizer

    from moetool.checkpoint.reader import Checkpoint
    from moetool.runtime.loading import load_model

    tokenizer = AutoTokenizer.from_pretrained(source)
    model = load_model(Checkpoint.open(source), torch.float32)
    balanced = hasattr(model.config, "output_router_logits")
    if balanced:
        model.config.output_router_logits = True
    train(model, _tokens(tokenizer, text), steps, TUNING_RATE, seed + 1, progress, "Fine-tune")
    if balanced:
        model.config.output_router_logits = False
    _save(model, tokenizer, target)


def _tokens(tokenizer: "PreTrainedTokenizerBase", text: Path) -> Tensor:
    return torch.tensor(tokenizer(text.read_text(encoding="utf-8"), verbose=False)["input_ids"])


def _save(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", path: Path) -> None:
    with quiet():
        model.to(torch.bfloat16).save_pretrained(path)
        tokenizer.save_pretrained(path)
    open_to_readers(*path.glob("*.safetensors"))
