"""The file by which Ollama takes in an export."""

from pathlib import Path

import pytest

from moetool.export.gguf.modelfile import generation_defaults, modelfile


def test_a_model_with_a_template_and_ways_of_drawing() -> None:
    given = {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05, "do_sample": True, "top_p": None}
    assert modelfile("model.gguf", 32768, given, has_template=True).splitlines()[1:] == [
        "FROM ./model.gguf",
        "PARAMETER num_ctx 8192",
        "PARAMETER temperature 0.7",
        "PARAMETER top_k 20",
        "PARAMETER repeat_penalty 1.05",
    ]


def test_a_model_that_goes_on_with_a_text() -> None:
    assert modelfile("model.gguf", 512, {}, has_template=False).splitlines()[1:] == [
        "FROM ./model.gguf",
        "PARAMETER num_ctx 512",
        'TEMPLATE """{{ .Prompt }}"""',
    ]
    assert "num_ctx" not in modelfile("model.gguf", None, {}, has_template=False)


@pytest.mark.parametrize("content", ["[1, 2]", "{", "null"])
def test_a_generation_config_that_holds_no_object_has_no_defaults(content: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    assert generation_defaults(tmp_path) == {}


def test_defaults_are_those_of_the_generation_config(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    assert generation_defaults(tmp_path) == {"temperature": 0.5}
    assert generation_defaults(tmp_path / "none") == {}
