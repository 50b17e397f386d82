"""The file by which Ollama takes in an export."""

from moetool.export.gguf.modelfile import modelfile


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
