"""Words of other tools are answered with what exists here."""

import re
from typing import Any

import pytest

from moetool.cli.foreign import _COMMANDS, command_here
from moetool.cli.names import commands
from moetool.stages import stages


@pytest.mark.parametrize("name", _COMMANDS)
def test_what_is_named_instead_exists(name: str) -> None:
    assert name not in commands()
    said = re.findall(r"`moetool ([a-z-]+)(?: --method ([a-z-]+))?`", command_here(name))
    assert said
    for command, method in said:
        assert command in commands()
        if method:
            assert method in stages()


def test_a_command_of_another_tool(run_cli: Any) -> None:
    assert "Here it is `moetool compress --method quantize`." in run_cli("quantize", "model").stderr
    assert "every command takes a name on the hub" in run_cli("download", "model").stderr
    assert "Did you mean compress?" in run_cli("compres", "model").stderr
