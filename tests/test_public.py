"""What `import moetool` gives."""

import pydoc
from pathlib import Path

import pytest

import moetool
from moetool.errors import UsageError
from moetool.runtime.synthesis import synthesize


@pytest.mark.parametrize("name", moetool.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(moetool, name)


def test_completion_and_help_show_every_public_name() -> None:
    assert {*moetool.__all__} <= {*dir(moetool)}
    assert "synthesize(model" in pydoc.render_doc(moetool, renderer=pydoc.plaintext)


def test_synthesize_is_imported_when_it_is_asked_for() -> None:
    assert moetool.synthesize is synthesize


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'synthesis'"):
        moetool.synthesis  # noqa: B018


@pytest.mark.parametrize("given", ["small", Path("small"), None])
@pytest.mark.parametrize(("name", "more"), [("synthesize", ()), ("page_experts", ()), ("set_keep", (0.5,))])
def test_a_path_is_no_loaded_model(given: object, name: str, more: tuple[float, ...]) -> None:
    """What is meant is said, rather than that a string has no attribute `modules`."""
    with pytest.raises(UsageError, match=f"moetool.{name} takes a loaded model, not a {type(given).__name__}: load it"):
        getattr(moetool, name)(given, *more)
