"""What `import moetool` gives."""

import pydoc

import pytest

import moetool
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
