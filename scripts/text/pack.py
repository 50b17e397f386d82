"""Pack the readable sources of the bundled text, `KIND/NAME.txt` beside this file, into the package: `make text`."""

import json
import lzma
from pathlib import Path

from moetool.calibration.bundled import PACKED

SOURCES = Path(__file__).parent


def read_sources(folder: Path = SOURCES) -> list[list[str]]:
    """`[kind, name, text]` of every source, ordered by kind and then by name."""
    files = sorted(folder.glob("*/*.txt"), key=lambda file: (file.parent.name, file.stem))
    return [[file.parent.name, file.stem, file.read_bytes().decode()] for file in files]


def pack(sources: list[list[str]]) -> bytes:
    """The packed file: the same bytes for the same sources, as long as liblzma is the same."""
    content = json.dumps(sources, ensure_ascii=False, separators=(",", ":")).encode()
    return lzma.compress(content, preset=9 | lzma.PRESET_EXTREME)


def main() -> None:
    sources = read_sources()
    packed = pack(sources)
    PACKED.write_bytes(packed)
    for kind in dict.fromkeys(kind for kind, _, _ in sources):
        sizes = [len(text.encode()) for of, _, text in sources if of == kind]
        print(f"| {kind} | {len(sizes)} | {round(sum(sizes) / 1000)} |")
    raw = sum(len(text.encode()) for _, _, text in sources)
    print(f"{raw:,} bytes in {len(sources)} pieces, packed {len(packed):,}")


if __name__ == "__main__":
    main()
