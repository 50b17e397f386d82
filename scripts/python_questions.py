"""Write instructions that any machine has: what functions of Python's standard library do, by their docstrings.

    python scripts/python_questions.py DIRECTORY

DIRECTORY gets `train.jsonl` and `test.jsonl`, records of `messages`, and `test.txt`, the questions and answers of the
latter as text. A tenth of the names is for the test, chosen by digest. The answers are Python's (PSF licence).
"""

import argparse
import hashlib
import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path

MODULES = (
    "argparse", "asyncio", "base64", "bisect", "builtins", "calendar", "collections", "configparser", "contextlib",
    "copy", "csv", "datetime", "decimal", "difflib", "email.message", "fnmatch", "fractions", "functools", "glob",
    "gzip", "hashlib", "heapq", "html", "http.client", "importlib", "inspect", "io", "ipaddress", "itertools",
    "json", "locale", "logging", "math", "mimetypes", "multiprocessing", "operator", "os", "os.path", "pathlib",
    "pickle", "platform", "pprint", "queue", "random", "re", "sched", "shlex", "shutil", "signal", "socket",
    "sqlite3", "ssl", "statistics", "string", "struct", "subprocess", "sys", "tarfile", "tempfile", "textwrap",
    "threading", "time", "timeit", "tokenize", "traceback", "types", "unittest", "urllib.parse", "urllib.request",
    "uuid", "warnings", "weakref", "xml.etree.ElementTree", "zipfile", "zlib",
)  # fmt: skip
_LENGTH = range(30, 400)  # characters of an answer


def questions() -> Iterator[tuple[str, str]]:
    """Names, and what their docstrings say first; each answer once."""
    said = set()
    for module in MODULES:
        for name, thing in _documented(importlib.import_module(module), module, depth=2):
            answer = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
            if len(answer) in _LENGTH and answer not in said:
                said.add(answer)
                yield name, answer


def is_held_out(name: str) -> bool:
    """Whether a name is of the tenth that nothing is to be tuned on."""
    return hashlib.sha256(name.encode()).digest()[0] < 26


def _documented(owner: object, prefix: str, depth: int) -> Iterator[tuple[str, object]]:
    for name, thing in sorted(vars(owner).items()):
        if name.startswith("_") or not callable(thing):
            continue
        yield f"{prefix}.{name}", thing
        if depth > 1 and inspect.isclass(thing):
            yield from _documented(thing, f"{prefix}.{name}", depth - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[tuple[str, str]]] = {"train": [], "test": []}
    for name, answer in questions():
        parts["test" if is_held_out(name) else "train"].append((f"What does `{name}` do in Python?", answer))
    for part, own in parts.items():
        said = [[{"role": "user", "content": asked}, {"role": "assistant", "content": answer}] for asked, answer in own]
        (directory / f"{part}.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in said))
    (directory / "test.txt").write_text("\n\n".join(f"{asked}\n{answer}" for asked, answer in parts["test"]) + "\n")
    print(f"{len(parts['train'])} to train on, {len(parts['test'])} to test with")


if __name__ == "__main__":
    main()
