"""Write three small tasks with four choices each for `moetool eval --tasks-dir`, of what any machine has.

    python scripts/multiple_choice.py TEXT DIRECTORY [--questions 300]

- `sums`: additions and subtractions of numbers up to 20, after three of them. Wrong answers are off by 1, 2 or 10.
- `last_word`: how a sentence of TEXT ends, after what stands before it. The other words end other sentences of TEXT,
  after the same word as this one.
- `python_docs`: what a function of Python's standard library does, among what three of its neighbours do, by their
  docstrings (PSF licence). The names are those that `python_questions.py` holds out.

TEXT is one that nothing was calibrated or trained on. Equal arguments give equal files in one version of Python.
"""

import argparse
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from python_questions import is_held_out, questions

EXAMPLES = "6 + 3 = 9\n14 - 5 = 9\n11 + 8 = 19\n"
CONTEXT = 60  # words before the last one of a sentence
TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {name}.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{asked}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - {{metric: {metric}, aggregation: mean, higher_is_better: true}}
"""
Question = tuple[str, str, list[str]]  # what is asked, the answer, and three others


def sums(draw: random.Random) -> Iterator[Question]:
    """Additions and subtractions without end."""
    while True:
        first, second = sorted((draw.randint(2, 20), draw.randint(2, 20)), reverse=True)
        sign, answer = draw.choice((("+", first + second), ("-", first - second)))
        near = {answer + 1, answer + 2, answer - 1, answer - 2, answer + 10, answer - 10}
        wrong = draw.sample(sorted(own for own in near if own >= 0), 3)
        yield f"{EXAMPLES}{first} {sign} {second} =", str(answer), [str(own) for own in wrong]


def last_words(text: str, draw: random.Random) -> Iterator[Question]:
    """Ends of sentences, in a random order."""
    words = text.replace(" .", ".").split()  # WikiText has a space there
    found = ((place, re.fullmatch(r"([a-z]{4,})\.", word)) for place, word in enumerate(words))
    ends = [(place, match[1]) for place, match in found if match is not None and place >= CONTEXT]
    after = defaultdict[str, set[str]](set)
    for place, word in ends:
        after[words[place - 1]].add(word)
    draw.shuffle(ends)
    for place, word in ends:
        if len(others := sorted(after[words[place - 1]] - {word})) >= 3:
            yield " ".join(words[place - CONTEXT : place]), word, draw.sample(others, 3)


def of_python(draw: random.Random) -> Iterator[Question]:
    """Functions that are held out, in a random order, each beside others of its module."""
    by_module: dict[str, list[str]] = {}
    held_out = []
    for name, answer in questions():
        by_module.setdefault(name.partition(".")[0], []).append(answer)
        if is_held_out(name):
            held_out.append((name, answer))
    draw.shuffle(held_out)
    for name, answer in held_out:
        others = [own for own in by_module[name.partition(".")[0]] if own != answer]
        if len(others) >= 3:
            yield f"Question: What does `{name}` do in Python?\nAnswer:", answer, draw.sample(others, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--questions", type=int, default=300, help="of each task, at most")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    text = options.text.read_text(encoding="utf-8")
    draws = {name: random.Random(name) for name in ("sums", "last_word", "python_docs")}
    tasks = {
        "sums": (sums(draws["sums"]), "acc"),
        "last_word": (last_words(text, draws["last_word"]), "acc"),
        "python_docs": (of_python(draws["python_docs"]), "acc_norm"),
    }
    for name, (asked, metric) in tasks.items():
        rows = []
        for _, (question, answer, wrong) in zip(range(options.questions), asked, strict=False):
            choices = draws[name].sample([answer, *wrong], 4)
            rows.append({"asked": question, "choices": choices, "answer": choices.index(answer)})
        (options.directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (options.directory / f"{name}.yaml").write_text(TASK.format(name=name, metric=metric))
        print(f"{name}: {len(rows)} questions")


if __name__ == "__main__":
    main()
