"""Finding and reading model files."""

from __future__ import annotations

import contextlib
import json
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NoReturn

from hicache_core.errors import ModelFileError, UnknownNameError
from hicache_core.models.entries import Model
from hicache_core.models.fields import Node
from hicache_core.models.parse import parse_model

_SUFFIX = ".json"


def _shipped() -> dict[str, Traversable]:
    folder = files("hicache_core.models").joinpath("data")
    found = {entry.name.removesuffix(_SUFFIX): entry for entry in folder.iterdir()}
    return {name: found[name] for name in sorted(found) if found[name].name.endswith(_SUFFIX)}


def model_names() -> tuple[str, ...]:
    """The models that this distribution ships, in alphabetical order."""
    return tuple(_shipped())


def load_model(name_or_path: str | Path) -> Model:
    """A model of this distribution, or of a file.

    Args:
        name_or_path: one of :func:`model_names`, which wins over a file of that name, or the path of a model
            file.

    Raises:
        UnknownNameError: neither a shipped model nor the path of a file.
        ModelFileError: the file cannot be read or breaks a rule of the schema.
    """
    shipped = _shipped()
    name = str(name_or_path)
    if name in shipped:
        return _read(shipped[name], shipped[name].name)
    path = Path(name_or_path)
    with contextlib.suppress(OSError):
        # A name too long for a file is no file.
        if path.suffix == _SUFFIX or path.is_file():
            return _read(path, name)
    raise UnknownNameError(
        who="model",
        got=f"'{name}'",
        expected=f"one of {', '.join(shipped)}, or the path of a model file",
        remedy="Give one of these; `hicache models` lists what each has.",
    )


def _read(file: Path | Traversable, title: str) -> Model:
    try:
        value = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_no_key_twice)
    except OSError as error:
        _refuse(title, error, f"{type(error).__name__}: {error.strerror}", "a file that can be read")
    except (ValueError, RecursionError) as error:
        _refuse(title, error, f"{type(error).__name__}: {error}", "a JSON document in UTF-8")
    return parse_model(Node(file=title, path="", value=value))


def _refuse(title: str, error: Exception, got: str, expected: str) -> NoReturn:
    raise ModelFileError(
        who=title, got=got, expected=expected, remedy="Correct the file or give another with --model."
    ) from error


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of the document; a key that stands twice would silently hide a pool or a variant."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        twice = sorted({key for key, _ in pairs if [k for k, _ in pairs].count(key) > 1})
        raise ValueError(f"the keys {twice} stand twice in one object")
    return entries
