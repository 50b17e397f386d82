"""A model in a process of its own, and what its memory is."""

import shutil
from contextlib import closing
from pathlib import Path

import pytest
from families import build

from moetool.errors import InvalidInputError, ResourceError
from moetool.measure.bench.options import BenchOptions
from moetool.measure.bench.runner import HereRunner, ThereRunner, weight_bytes

OPTIONS = BenchOptions(batch=(2,), lengths=(8,), new_tokens=2)


def test_a_process_answers_as_this_one_does(tiny_mixtral: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(tiny_mixtral, tmp_path / "broken")
    (broken / "config.json").write_text(
        (broken / "config.json").read_text().replace('"vocab_size": 288', '"vocab_size": 9')
    )
    with (
        closing(ThereRunner(str(tiny_mixtral), OPTIONS, 1)) as there,
        closing(ThereRunner(str(broken), OPTIONS, 1)) as wrong,
    ):
        here = HereRunner(str(tiny_mixtral), OPTIONS)
        here.prepare()
        there.prepare()
        ours, theirs = here.load(), there.load()
        assert theirs.costs == ours.costs
        assert theirs.dtype == ours.dtype == "float32", "as it is stored"
        assert theirs.memory.weight_bytes == ours.memory.weight_bytes
        assert min(there.time(2, 8)) > 0
        memory = there.warm_up(2, 8)
        assert memory.peak_bytes >= theirs.memory.load_peak_bytes > 0
        assert memory.device_peak_bytes == 0
        with pytest.raises(InvalidInputError, match="vocab_size is 9"):
            wrong.prepare()
        there._process.kill()
        with pytest.raises(ResourceError, match="tiny-mixtral was killed, most likely for its memory"):
            there.time(2, 8)
    assert not there._process.is_alive()
    assert not wrong._process.is_alive()


def test_tied_weights_count_once() -> None:
    tied, loose = (build("mixtral", tie_word_embeddings=tied) for tied in (True, False))
    assert weight_bytes(loose) - weight_bytes(tied) == 288 * 32 * 4
