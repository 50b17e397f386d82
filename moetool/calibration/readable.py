"""The bundled text as a tokenizer reads it: without what it cuts into bytes, and no more of it than is asked for."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moetool.calibration.bundled import BundledPiece, pieces
from moetool.calibration.cutting import shuffled_windows
from moetool.calibration.opening import Tokenizer
from moetool.errors import InvalidInputError
from moetool.numerics.seeding import generator

_LOOKED_AT = 512  # characters of a piece by which it is judged, of which its words count: digits are often cut apart
_FEWEST = 200  # characters in words, below which nothing is judged
_TORN = 0.5  # tokens per byte above which a tokenizer that needs half of them elsewhere cannot read a text
_NAMED = 4  # pieces that are left out, beyond which they are counted
_SPAN = 10  # characters of a span for every token of a passage: about two passages, with a line to spare
_PASSAGES = 4  # of a window, each from another place of its kind
_SHORTEST = 48  # tokens of a passage; a window of fewer than twice as many is one


@dataclass(frozen=True)
class ReadableText:
    """The bundled text that a tokenizer can read.

    Attributes:
        texts: by kind, the readable pieces of the kind, one after the other.
        left_out: `kind/name` of the pieces that the tokenizer cannot read.
    """

    texts: dict[str, str]
    left_out: tuple[str, ...]


def readable_text(kinds: Collection[str], tokenizer: Tokenizer) -> ReadableText:
    """The bundled text of some kinds, without the pieces that are torn into bytes: more than half a token per byte, and
    twice as many as the piece with the fewest."""
    rates = [_tokens_per_byte(piece, tokenizer) for piece in pieces()]
    limit = max(_TORN, 2 * min(filter(None, rates), default=0.0))
    found, torn = dict[str, list[str]](), list[str]()
    for piece, rate in zip(pieces(), rates, strict=True):
        if piece.kind not in kinds:
            continue
        if rate > limit:
            torn.append(f"{piece.kind}/{piece.name}")
        else:
            found.setdefault(piece.kind, []).append(piece.text)
    return ReadableText({kind: "".join(own) for kind, own in found.items()}, tuple(torn))


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


class KindWindows:
    """Windows of one kind of the bundled text, drawn at random without overlap from up to four passages each. They are
    tokenized only as they are asked for.

    The text is cut at line breaks into spans of about two passages, which are read in random order. Each gives one
    passage, and its others once all spans have been read. Where that many spans are not there, all of the text is one.
    A model that is calibrated on passages from more places loses less on other text.
    """

    def __init__(self, kind: str, text: str, tokenizer: Tokenizer, *, due: int, length: int, seed: int) -> None:
        """`due` windows of `length` tokens will be taken first; what they are depends on both and the `seed` alone."""
        self._tokenizer, self._length = tokenizer, length
        self._passages = max(1, min(_PASSAGES, length // _SHORTEST))
        self._of_passage = -(-length // self._passages)  # tokens; the last passage of a window is cut to fit
        self._generator = generator(seed, "bundled", kind)
        spans = _spans(text, len(text) // (_SPAN * self._of_passage))
        self._each, due = 1, due * self._passages
        if len(spans) < due:
            spans, self._each = [text], due
        order = torch.randperm(len(spans), generator=self._generator).tolist()
        self._unread = [spans[place] for place in reversed(order)]
        self._first, self._further = list[Tensor](), list[Tensor]()

    def take(self, count: int) -> list[Tensor]:
        """The next `count` windows, each `[length]`, or as many as are left."""
        found, each = self._take(count * self._passages), self._passages
        firsts = range(0, len(found) - each + 1, each)
        return [torch.cat(found[first : first + each])[: self._length] for first in firsts]

    def _take(self, count: int) -> list[Tensor]:
        """The next `count` passages, or as many as are left."""
        while len(self._first) < count and self._unread:
            tokens = torch.tensor(_ids(self._unread.pop(), self._tokenizer), dtype=torch.int64)
            passages = list(shuffled_windows(tokens, self._each, self._of_passage, self._generator))
            self._first += passages[:1]
            self._further += passages[1:]
        missing = max(0, count - len(self._first))
        taken = self._first[:count] + self._further[:missing]
        del self._first[:count], self._further[:missing]
        return taken


def _spans(text: str, count: int) -> list[str]:
    """A text cut at line breaks into at most `count` spans of about the same length, at least one."""
    cuts = [0]
    for number in range(1, count):
        found = text.find("\n", number * len(text) // count) + 1
        if cuts[-1] < found < len(text):
            cuts.append(found)
    return [text[start:stop] for start, stop in zip(cuts, [*cuts[1:], len(text)], strict=True)]


class BundledWindows:
    """Windows of several kinds of the bundled text, as a tokenizer reads them."""

    def __init__(self, due: Mapping[str, int], tokenizer: Tokenizer, *, length: int, seed: int) -> None:
        """So many windows of `length` tokens are due of each kind; none is read where none is."""
        found = readable_text(due, tokenizer) if sum(due.values()) else ReadableText({}, ())
        self._due, self._left_out = due, found.left_out
        self._pools = {
            kind: KindWindows(kind, text, tokenizer, due=due[kind], length=length, seed=seed)
            for kind, text in found.texts.items()
        }
        self.drawn = self.take(due)

    def take(self, due: Mapping[str, int]) -> dict[str, list[Tensor]]:
        """Draw the due number of windows of each kind. What one kind lacks is drawn from the others in turn."""
        taken = {kind: self._pools[kind].take(count) if kind in self._pools else [] for kind, count in due.items()}
        missing = sum(due.values()) - sum(map(len, taken.values()))
        willing = [kind for kind, count in due.items() if kind in self._pools and len(taken[kind]) == count]
        while missing and willing:
            more = {kind: self._pools[kind].take(1) for kind in willing[:missing]}
            willing = [*willing[missing:], *(kind for kind, found in more.items() if found)]
            for kind, found in more.items():
                taken[kind] += found
                missing -= len(found)
        return taken

    @property
    def lack(self) -> str | None:
        """The reason why no window could be drawn, as a clause; `None` if some could, or if none was due."""
        if any(self.drawn.values()) or not sum(self._due.values()):
            return None
        if not self._pools:
            return "This tokenizer cuts all of the bundled text into bytes"
        return "No kind of the bundled text is as long as one window"

    def check(self, instead: str) -> None:
        """Raise `InvalidInputError` if there is no window; `instead` is what to give otherwise."""
        if (lack := self.lack) is not None:
            shorter = "a smaller --sequence-length, or " if self._pools else ""
            raise InvalidInputError(f"{lack}: give {shorter}{instead}.")

    def remarks(self) -> Iterator[str]:
        """Explain in sentences how the windows differ from those that were asked for, if they do."""
        if (lack := self.lack) is not None:
            yield f"{lack}: the given text alone is used."
            return
        if self._left_out:
            yield left_out_remark(self._left_out)
        few = [kind for kind, found in self.drawn.items() if len(found) < self._due[kind]]
        unread, short = ([kind for kind in few if (kind in self._pools) == is_read] for is_read in (False, True))
        is_made_up = any(len(found) > self._due[kind] for kind, found in self.drawn.items())
        end = "; others stand in." if is_made_up else "."
        if unread:
            yield f"Kinds of the bundled text of which it can read nothing: {', '.join(unread)}{end}"
        if short and len(self.drawn) > 1:
            listed = ", ".join(f"{kind} {len(self.drawn[kind])} of {self._due[kind]}" for kind in short)
            yield f"Kinds of the bundled text with too few windows of this length: {listed}{end}"
        due, there = sum(self._due.values()), sum(map(len, self.drawn.values()))
        if there < due:
            yield f"The bundled text has {there} window{'s' if there != 1 else ''} of this length, not {due}."


def left_out_remark(names: Collection[str]) -> str:
    """A sentence on the pieces `KIND/NAME` of the bundled text that a tokenizer cuts into bytes: a few are named, more
    are counted by kind."""
    listed = [*names]
    if len(listed) > _NAMED:
        listed = [f"{count} of {kind}" for kind, count in Counter(name.partition("/")[0] for name in names).items()]
    left_out = f"{len(names)} piece{' is' if len(names) == 1 else 's are'} left out"
    return f"Of the bundled text {left_out}, since this tokenizer splits their words into bytes: {', '.join(listed)}."
