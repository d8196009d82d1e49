"""The schema files: each JSON output follows one, each schema named in the code has a file, and they bite."""

from __future__ import annotations

import ast
import copy
import json
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import hicache_core
from hicache_core.cli import introspection
from hicache_core.plugins import load_plugins
from hicache_core.spec import PLATFORMS
from tests.cli.commands import generated, hicache, replay_options

FOLDER = files("hicache_core.cli").joinpath("schemas")
NAME = re.compile(r"hicache\.(?P<name>[a-z-]+)/(?P<version>[0-9]+)")
PAIR = ["--io-backend", "kernel", "--layout", "page_first"]
MODEL = ["--model", "deepseek-v4-pro", "--variant", "cuda_v4"]
ROCM = ["--platform", "rocm-mi355x"]
REFUSED = ["--io-backend", "kernel", "--layout", "layer_first"]

OUTPUTS: dict[str, tuple[int, list[str]]] = {
    "plugins": (0, ["plugins"]),
    "models": (0, ["models"]),
    "one model": (0, ["models", "qwen3.5-397b-a17b"]),
    "describe": (0, ["describe", "mha", "--platform", "npu"]),
    "describe without bytes": (0, ["describe", "dsv4_anchor"]),
    "describe a state": (0, ["describe", "mamba", "--platform", "rocm"]),
    "check yes": (0, ["check", *MODEL, *ROCM, *PAIR]),
    "check if probed": (0, ["check", *MODEL, *ROCM, *REFUSED, "--allow-kernel-layer-first"]),
    "check no": (1, ["check", *MODEL, *ROCM, *REFUSED]),
    "matrix": (0, ["check", *MODEL, *ROCM, "--matrix"]),
    "matrix of all": (0, ["check", *MODEL, "--matrix", "--allow-kernel-layer-first"]),
    "plan": (0, ["plan", *MODEL, *ROCM, *PAIR, "--host-size", "64GiB"]),
    "plan with a host": (
        0,
        [
            "plan",
            *MODEL,
            *ROCM,
            *PAIR,
            "--host-size",
            "64GiB",
            "--host-memory",
            "1TB",
            "--device-pages",
            "99999",
        ],
    ),
    "plan no": (
        1,
        ["plan", *MODEL, *ROCM, *REFUSED, "--host-size", "1MB", "--host-memory", "9MB", "--ranks", "10"],
    ),
}


def validator(schema: str) -> Draft202012Validator:
    """The validator of the file of a schema such as ``hicache.check/1``."""
    found = NAME.fullmatch(schema)
    assert found is not None
    text = FOLDER.joinpath(f"{found['name']}-{found['version']}.json").read_text(encoding="utf-8")
    return Draft202012Validator(json.loads(text))


def errors(output: dict[str, Any]) -> list[str]:
    """What is wrong with an output, by the schema that it names."""
    return [f"{e.json_path}: {e.message}" for e in validator(output["schema"]).iter_errors(output)]


def printed(code: int, arguments: list[str]) -> dict[str, Any]:
    """The JSON of a command that exits with ``code``."""
    result = hicache(*arguments, "--json")
    assert (result.exit_code, result.stderr) == (code, "")
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("output", OUTPUTS)
def test_output_follows_its_schema(output: str) -> None:
    """Of every command and every kind of answer."""
    assert errors(printed(*OUTPUTS[output])) == []


def test_trace_statistics_follow_their_schema(tmp_path: Path) -> None:
    """With an LRU curve and without."""
    path = str(generated(tmp_path / "t.jsonl", 10))
    assert errors(printed(0, ["trace", "inspect", path])) == []
    assert errors(printed(0, ["trace", "inspect", path, "--lru", "3"])) == []


def test_replay_follows_its_schema(tmp_path: Path) -> None:
    """What is printed, and the report that is written, which is the same."""
    path, report = str(generated(tmp_path / "t.jsonl", 10)), tmp_path / "report.json"
    found = printed(0, ["replay", path, *replay_options(), "--report", str(report)])
    assert errors(found) == []
    assert json.loads(report.read_text(encoding="utf-8")) == found


def test_refused_plugin_follows_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no plugin loads, a reason stands in the place of families."""
    from importlib.metadata import EntryPoint

    broken = EntryPoint(name="broken", value="no_such_module_anywhere", group="hicache.pools")
    monkeypatch.setattr(introspection, "load_plugins", lambda: load_plugins(found=[broken]))
    found = printed(0, ["plugins"])
    assert [plugin["state"] for plugin in found["plugins"]] == ["refused"]
    assert errors(found) == []


def test_each_platform_has_a_matrix_that_follows_the_schema() -> None:
    """Exit 1 where no cell is a yes is an answer too."""
    for platform in PLATFORMS:
        result = hicache("check", "--model", "qwen3-30b-a3b", "--platform", platform, "--matrix", "--json")
        assert result.exit_code in (0, 1)
        assert errors(json.loads(result.stdout)) == []


def _schemas_in_code() -> set[str]:
    root = Path(hicache_core.__file__).parent
    texts = (
        node.value
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return {text for text in texts if NAME.fullmatch(text)}


def test_every_schema_that_the_code_names_has_a_file_and_no_file_is_left_over() -> None:
    """Each file is a valid schema of draft 2020-12 that asks for its own name."""
    named = {text.removeprefix("hicache.").replace("/", "-") + ".json" for text in _schemas_in_code()}
    assert {"check-1.json", "plan-1.json", "plugins-1.json"} <= named
    assert {entry.name for entry in FOLDER.iterdir()} == named
    for schema in _schemas_in_code():
        content = validator(schema).schema
        assert isinstance(content, dict)
        Draft202012Validator.check_schema(content)
        assert content["properties"]["schema"] == {"const": schema}


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(child)


def test_every_object_of_a_schema_says_which_keys_it_has() -> None:
    """No object takes keys that nobody described."""
    for schema in _schemas_in_code():
        for part in _objects(validator(schema).schema):
            if part.get("type") == "object":
                assert "additionalProperties" in part
                assert part["additionalProperties"] is not True


@pytest.mark.parametrize(
    "output", ["plugins", "models", "describe", "check yes", "check no", "matrix", "plan"]
)
def test_schema_refuses_what_is_missing_added_or_mistyped(output: str) -> None:
    """Each key of the whole in turn: the schema can fail."""
    good = printed(*OUTPUTS[output])
    for key in good:
        assert key == "schema" or errors({k: v for k, v in good.items() if k != key}) != []
        assert key == "schema" or errors({**good, key: {"no": ["such"]}}) != []
    assert errors({**good, "surprise": 1}) != []


def test_schema_ties_the_answer_to_its_reasons() -> None:
    """A no has violations, a yes has none, and a yes if probed says what the probe proves."""
    yes, no = printed(*OUTPUTS["check yes"]), printed(*OUTPUTS["check no"])
    probed = printed(*OUTPUTS["check if probed"])
    assert errors({**no, "violations": []}) != []
    assert errors({**yes, "violations": no["violations"]}) != []
    assert errors({**probed, "conditions": []}) != []
    broken = copy.deepcopy(no)
    broken["violations"][0]["id"] = "not a rule"
    assert errors(broken) != []
