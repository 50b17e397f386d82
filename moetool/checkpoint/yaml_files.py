"""Reading a YAML file that a user wrote or edited: one error for everything that is wrong with it as YAML."""

from pathlib import Path
from typing import Any

import yaml

from moetool.errors import InvalidInputError


class _OnceLoader(yaml.SafeLoader):
    """YAML in which a mapping has every key once: of two values for one key, PyYAML would silently drop the first."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (name := (key.tag, key.value)) in keys:
                    raise yaml.constructor.ConstructorError(None, None, f"'{key.value}' is there twice", key.start_mark)
                keys.add(name)
        return node


def read_yaml(file: Path, what: str) -> Any:
    """The content of a file, `what` being how errors call it, such as `the plan`.

    Raises:
        InvalidInputError: it cannot be read, or is not YAML, or a mapping in it has a key twice.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"Cannot read {what} {file}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"Cannot read {what} {file}: it is no text ({error.reason}).") from error
    try:
        return yaml.load(text, _OnceLoader)
    except RecursionError:
        raise InvalidInputError(f"{what[0].upper()}{what[1:]} {file} is nested too deep.") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # ValueError: of a date or number that there is not
        raise InvalidInputError(
            f"{what[0].upper()}{what[1:]} {file} is not valid YAML: {' '.join(str(error).split())}."
        ) from error
