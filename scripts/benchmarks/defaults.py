"""What `moetool compress MODEL OUT --ratio R` loses without --method, beside every named method in as many bytes.

    python scripts/benchmarks/defaults.py MODEL… --data HOME.txt,OTHER.txt --work DIR

The default is `auto` with its default options, on the bundled text. Methods that take --ratio are made at the same
ratios. `ders-quantize` takes bits instead: it is made in 4, its default, and in 3, and the default once more in the
bytes of each. All is done by `moetool compare`, in a folder of DIR for each model: a run that was stopped goes on where
it was. No experts are removed: `reap` and its like are for engines that read nothing else.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from _common import made_by, publish

DEFAULT = "default"
METHODS = (  # names of rows, as `moetool compare` takes them
    "hybrid",
    "quantize",
    "quantize --scheme layer=quantize",
    "d2moe",
    "d2moe --factor-bits 8=d2moe",
    "mean-svd",
    "plain-svd",
)
OPTIONS = ("quantize --scheme layer:scheme=layer", "d2moe --factor-bits 8:factor_bits=8")
CLOSE = 0.005  # in thousandths of a nat: less than what is printed, and no loss to speak of


def moetool(*words: str) -> dict[str, Any]:
    """Result of a command, which says on stderr how far it is."""
    finished = subprocess.run([sys.executable, "-m", "moetool", *words, "--json"], stdout=subprocess.PIPE, text=True)
    if finished.returncode:
        sys.exit(finished.returncode)
    return json.loads(finished.stdout)


def shares_saved(model: str, work: Path, all_bits: Sequence[int]) -> dict[int, float]:
    """Share of the bytes that `ders-quantize` saves, by its bits, from its plans."""
    found = {}
    for bits in all_bits:
        words = ("--method", "ders-quantize", "--bits", str(bits), "--dry-run")
        plan = moetool("compress", model, str(work / "planned"), *words)
        found[bits] = 1 - plan["output_bytes"] / plan["input_bytes"]
    return found


def compared(model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of `moetool compare`: every method at every ratio, `ders-quantize`, and the default in its bytes."""
    work: Path = options.work / Path(model).resolve().name
    saved = shares_saved(model, options.work, options.bits)
    names = [f"{DEFAULT}=auto", *options.methods]
    rows = {name.partition("=")[0] for name in names}
    own = [option for option in OPTIONS if option.partition(":")[0] in rows]
    for bits in options.bits:
        names += [f"ders-quantize --bits {bits}=ders-quantize", f"{DEFAULT} {bits}=auto"]
        own += [f"ders-quantize --bits {bits}:bits={bits}", f"{DEFAULT} {bits}:ratio={saved[bits]:.5f}"]
    words = ["--methods", ",".join(names), "--ratios", ",".join(map(str, options.ratios)), "--data", options.data]
    words += [word for each in own for word in ("--option", each)]
    words += ["--samples", str(options.samples), "--sequence-length", str(options.sequence_length)]
    result = moetool("compare", model, *words, "--windows", str(options.windows), "--work", str(work))
    return result["rows"]


def groups(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Rows of about as many bytes, the default first: those of one ratio, and each `ders-quantize` with its default.

    What could not be made is left out, and so is a ratio at which that is the default.
    """
    made = [row for row in rows if "kl" in row]
    for ratio in sorted({row["asked"] for row in made if row["name"] == DEFAULT}):
        yield [row for row in made if row["asked"] == ratio]
    for row in made:
        if row["asked"] is None and row["name"].startswith(DEFAULT):
            bits = row["name"].removeprefix(DEFAULT).strip()
            yield [row, *(other for other in made if other["name"] == f"ders-quantize --bits {bits}")]


def table(rows: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> Iterator[str]:
    """Lines of a model's table. The last columns are the default's KL divergence over the row's, text by text."""
    columns = " | ".join(f"KL, {text}" for text in texts)
    ratios = " | ".join(f"default / it, {text}" for text in texts)
    yield f"| | smaller by | {columns} | {ratios} |"
    yield "|---|---|" + "---|" * (2 * len(texts))
    for group in groups(rows):
        own = [1000 * text["against"]["kl"] for text in group[0]["texts"]]
        for row in group:
            kls = [1000 * text["against"]["kl"] for text in row["texts"]]
            tops = [text["against"]["agreement"] for text in row["texts"]]
            cells = [f"{kl:.3f}, {top:.1%}" for kl, top in zip(kls, tops, strict=True)]
            over = ["" if row is group[0] else ratio(mine, kl) for mine, kl in zip(own, kls, strict=True)]
            name = "**default**" if row is group[0] else f"`{row['name']}`"
            yield f"| {name} | {row['saved']:.2%} | {' | '.join(cells)} | {' | '.join(over)} |"


def ratio(default: float, other: float) -> str:
    """The default's loss over another's, bold where that is more than 1.1 times; a dash where both are next to none."""
    if max(default, other) < CLOSE:
        return "–"
    found = default / max(other, 1e-9)
    return f"**{found:.2f}**" if found > 1.1 else f"{found:.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--data", required=True, help="texts to measure on, with commas")
    parser.add_argument("--methods", nargs="*", default=METHODS, metavar="NAME=METHOD", help="at every ratio")
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.4, 0.6, 0.75])
    parser.add_argument("--bits", nargs="*", type=int, default=[3, 4], help="of `ders-quantize`")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--windows", type=int, default=48, help="of every test text")
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--output", type=Path, help="write the tables to this file as well")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    texts = [Path(text).name for text in options.data.split(",")]
    listed = {"methods": options.methods, "ratios": options.ratios, "bits": options.bits}
    words = [word for name, values in listed.items() for word in (f"--{name}", *map(str, values))]
    lines = [
        made_by(
            f"python scripts/benchmarks/defaults.py MODEL… --data {','.join(texts)} {shlex.join(words)} "
            f"--samples {options.samples} --windows {options.windows} --sequence-length {options.sequence_length}"
        )
        + " KL divergence from the original in thousandths of a nat, the share of tokens for which both find the same "
        "one likeliest, and the default's KL divergence over the row's: more than 1.1 in bold."
    ]
    for model in options.models:
        lines += ["", f"## {Path(model).resolve().name}", "", *table(compared(model, options), texts)]
    publish(lines, options.output)


if __name__ == "__main__":
    main()
