"""Windows of several texts in one calibration set, and of the bundled text those that a tokenizer can read."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moetool.calibration.bundled import BundledPiece, pieces
from moetool.calibration.data import DataSpec, bundled_kinds
from moetool.calibration.opening import Tokenizer

_LOOKED_AT = 8192  # characters of a piece by which it is judged, of which its words count: digits are often cut apart
_FEWEST = 200  # characters in words, below which nothing is judged
_TORN = 0.5  # tokens per byte above which a tokenizer that needs half of them elsewhere cannot read a text


@dataclass(frozen=True)
class BundledTokens:
    """The bundled text as a tokenizer cuts it.

    Attributes:
        tokens: by kind, int64 `[tokens]`: the readable pieces of the kind, one after the other.
        left_out: `kind/name` of the pieces that the tokenizer cannot read.
    """

    tokens: dict[str, Tensor]
    left_out: tuple[str, ...]


def bundled_tokens(spec: DataSpec, tokenizer: Tokenizer) -> BundledTokens:
    """The tokens of the bundled text, or of the kind that `spec` names, without the pieces that are torn into bytes:
    more than half a token per byte, and twice as many as the piece with the fewest. Raises `UsageError` for a kind that
    there is not."""
    kinds = bundled_kinds(spec)
    chosen = [piece for piece in pieces() if piece.kind in kinds]
    rates = [_tokens_per_byte(piece, tokenizer) for piece in pieces()]
    limit = max(_TORN, 2 * min(filter(None, rates), default=0.0))
    torn = {piece for piece, rate in zip(pieces(), rates, strict=True) if rate > limit}
    found: dict[str, list[int]] = {}
    for piece in chosen:
        if piece not in torn:
            found.setdefault(piece.kind, []).extend(_ids(piece.text, tokenizer))
    return BundledTokens(
        {kind: torch.tensor(ids, dtype=torch.int64) for kind, ids in found.items()},
        tuple(f"{piece.kind}/{piece.name}" for piece in chosen if piece in torn),
    )


def _ids(text: str, tokenizer: Tokenizer) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False, return_attention_mask=False)["input_ids"])


def _tokens_per_byte(piece: BundledPiece, tokenizer: Tokenizer) -> float:
    """Tokens per byte of UTF-8 in a piece's words; what the tokenizer does not know counts as a token per byte. 0 for a
    piece of hardly any words."""
    text = "".join(character for character in piece.text[:_LOOKED_AT] if character.isalpha() or character == " ")
    if len(text) < _FEWEST:
        return 0.0
    ids, size = _ids(text, tokenizer), len(text.encode())
    unknown = getattr(tokenizer, "unk_token_id", None)
    lost = ids.count(unknown) if unknown is not None else 0
    return max(len(ids), size * lost / max(1, len(ids))) / size


def filled_shares(due: Sequence[int], there: Sequence[int]) -> list[int]:
    """How many windows to take of each kind: as many as are due, and where a kind has fewer, the rest from those with
    most to spare."""
    taken = [min(own, most) for own, most in zip(due, there, strict=True)]
    for _ in range(sum(due) - sum(taken)):
        spare = [most - own for own, most in zip(taken, there, strict=True)]
        if not any(spare):
            break
        taken[spare.index(max(spare))] += 1
    return taken


def interleaved_windows(parts: Sequence[Tensor]) -> Tensor:
    """Windows `[windows, length]` of several texts in an order in which any beginning has them all in proportion."""
    if len(parts) == 1:
        return parts[0]
    places = [
        ((place + 0.5) / len(part), which, place) for which, part in enumerate(parts) for place in range(len(part))
    ]
    return torch.stack([parts[which][place] for _, which, place in sorted(places)]) if places else torch.cat([*parts])
