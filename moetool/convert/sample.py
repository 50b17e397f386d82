"""Real text for a model of which nothing else is known: Python's own language reference, which every Python brings."""

import torch
from torch import Tensor

from moetool.calibration.opening import Tokenizer


def sample_text() -> str:
    """Some pages of English prose and code."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in ("assert", "assignment", "calls", "class", "context-managers"))


def sample_tokens(tokenizer: "Tokenizer | None", vocabulary: int, windows: int, length: int) -> Tensor:
    """Token ids `[windows, length]` of that text; without a tokenizer, every id once in a while."""
    if tokenizer is None:
        ids = (torch.arange(windows * length) * 7919) % vocabulary
    else:
        ids = torch.tensor(tokenizer(sample_text(), add_special_tokens=False, verbose=False)["input_ids"])
    repeats = -(-windows * length // len(ids))
    return ids.repeat(repeats)[: windows * length].view(windows, length)
