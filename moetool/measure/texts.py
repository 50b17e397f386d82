"""The texts of an evaluation: in batches, and whether a model was calibrated on their kinds."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from moetool.calibration.bundled import kinds
from moetool.calibration.data import BUNDLED, TEXT_SUFFIXES, DataSpec, parse_data
from moetool.calibration.opening import Bos, Tokenizer
from moetool.calibration.readable import left_out_remark
from moetool.calibration.windows import TextWindows, check_tokens, evaluation_texts
from moetool.checkpoint.identity import steps_since
from moetool.checkpoint.manifest import manifest_of
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.source import is_here
from moetool.errors import MoetoolError
from moetool.job.card import public
from moetool.job.progress import Progress

# Words by which files of one kind of text are told apart, as in `wiki.valid.txt` and `wiki.test.txt`.
_SPLITS = frozenset(
    {"train", "training", "valid", "validation", "val", "dev", "eval", "test", "held", "out", "heldout"}
)
# What a text's kind goes by: the name of a file or data set, and the configuration of one or the kind of bundled text.
_Kind = tuple[str, str | None]


@dataclass(frozen=True)
class BatchedTexts:
    """Texts cut into batches of windows, none of which is of two texts.

    Attributes:
        texts: with their windows.
        rows: windows in a batch, or less in a text's last.
    """

    texts: tuple[TextWindows, ...]
    rows: int

    @property
    def batches(self) -> list[Tensor]:
        """Windows `[batch, length]` of all texts, one text after the other."""
        return [rows for text in self.texts for rows in text.windows.split(self.rows)]

    @property
    def of_each(self) -> Iterator[tuple[TextWindows, slice]]:
        """Iterate over the texts, each with the range of batches that its windows fill."""
        begin = 0
        for text in self.texts:
            end = begin + -(-len(text.windows) // self.rows)
            yield text, slice(begin, end)
            begin = end


def open_texts(
    data: str,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    limit: int | None,
    bos: Bos,
    progress: Progress,
) -> tuple[TextWindows, ...]:
    """Open the texts of a DATA argument as windows of a model's tokens. Parts of the bundled text that the tokenizer
    cannot read are left out, which is logged.

    Raises:
        UsageError, InvalidInputError: as `evaluation_texts`, and where the tokenizer is another model's.
    """
    found = evaluation_texts(data, tokenizer, sequence_length=sequence_length, limit=limit, bos=bos)
    if found.left_out:
        progress.log(left_out_remark(found.left_out))
    for text in found.texts:
        check_tokens(text.windows, checkpoint.settings)
    return found.texts


def calibration_sources(checkpoint: Checkpoint, original: str | None) -> tuple[str, ...]:
    """The texts on which a model was calibrated, as its manifest names them, with the kinds of the bundled text that
    the last step mixed in; empty where there is no manifest, or it names none. All steps count that made it, or, if
    the manifest names the model `original` among their inputs, those since."""
    if (manifest := manifest_of(checkpoint.path)) is None:
        return ()
    sources = _sources(manifest.recipe.get("calibration"))
    named = {public(source) for source in sources}  # of earlier steps files are recorded without their folders
    steps = manifest.origins
    if original is not None and manifest.lineage:
        steps = steps_since(Checkpoint.open(original), manifest) or steps
    earlier = [_sources((step.chosen or {}).get("calibration")) for step in steps[1:]]
    sources += [source for found in earlier for source in found if source not in named]
    facts = manifest.statistics.get("calibration")
    windows = facts.get("kinds") if isinstance(facts, Mapping) else None
    if isinstance(windows, Mapping) and BUNDLED not in sources:
        mixed = [kind for kind in kinds() if windows.get(kind)]
        sources += [BUNDLED] if len(mixed) == len(kinds()) else [f"{BUNDLED}:{kind}" for kind in mixed]
    return tuple(dict.fromkeys(sources))


def is_own_kind(text: str, calibration: Sequence[str]) -> bool | None:
    """Whether calibration had text of a text's kind, as far as names tell: the same text, another split of it
    (`wiki.valid.txt` for `wiki.test.txt`, a data set's `validation` for its `test`), or the kind of the bundled text;
    `None` where calibration had no text."""
    if not calibration:
        return None
    name, part = _kind(text)
    return any(name == other and own in (part, None) for other, own in map(_kind, calibration))


def _sources(data: object) -> list[str]:
    if not isinstance(data, str):
        return []
    try:
        return [spec.written for spec in parse_data(data)]
    except MoetoolError:  # another version's, or a file's name that was a path elsewhere
        return data.split(",")


def _kind(text: str) -> _Kind:
    try:
        spec = DataSpec.parse(text)
    except MoetoolError:
        return text, None
    if spec.is_bundled:
        return spec.source, spec.config
    path = Path(spec.source)
    if path.suffix in TEXT_SUFFIXES:
        words = re.split(r"[.\s_-]+", path.stem)
        kept = [word for word in words if word.lower() not in _SPLITS]
        return "-".join(kept) or path.name, ""
    return (path.name, "") if is_here(spec.source) else (spec.source, spec.config or "")
