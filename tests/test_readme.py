"""The examples of the README run as they stand there."""

from __future__ import annotations

import re
import types
from pathlib import Path

import torch
from click import Context

from hicache_core import Controller, ControllerConfig, DevicePool, SimRuntime, platform_named
from hicache_core.cli import main
from hicache_core.plugins import PluginRegistry
from hicache_core.spec import IndexSpace, PoolGeometry
from tests.cli.commands import hicache

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


def example(name: str, language: str = "python") -> str:
    """The block behind the comment ``<!-- test: name -->``."""
    found = re.search(rf"<!-- test: {name} -->\n```{language}\n(.*?)```", README, re.DOTALL)
    assert found is not None, f"the README has no example '{name}'"
    return found.group(1)


def test_the_integrator_example_moves_pages_there_and_back() -> None:
    """After the example, device pages 4 and 5 hold what pages 1 and 2 held."""
    code = example("integrator")
    fill = "for layers in rows.values():\n    [layer.random_(0, 256) for layer in layers]\n"
    before, rest = code.split("config = ")
    names: dict[str, object] = {}
    exec(compile(f"{before}{fill}config = {rest}", "README.md", "exec"), names)
    rows = names["rows"]
    assert isinstance(rows, dict)
    for layers in rows.values():
        for layer in layers:
            assert torch.equal(layer[64:96], layer[16:48])
            assert not torch.equal(layer[64:96], layer[96:128])


def test_the_author_example_is_a_working_plugin() -> None:
    """The example registers, declares and moves bytes under the alias profile."""
    module = types.ModuleType("ring_state")
    exec(compile(example("author"), "README.md", "exec"), module.__dict__)
    registry = PluginRegistry()
    registry.register(module, name="ring_state")
    geometry = PoolGeometry(
        pool="states",
        family="ring_state",
        index_space=IndexSpace(name="full", page_slots=4),
        layer_ids=[0, 2],
        params={"ring_slots": 2, "slot_bytes": 48},
        anchor=True,
    )
    spec = registry.spec(geometry)
    runtime = SimRuntime(platform_named("rocm-mi355x"))
    rows = [runtime.allocate(6 * 96, 0).view(6, 96).random_(0, 256) for _ in range(2)]
    config = ControllerConfig(io_backend="kernel", layout="page_first", host_pages=3)
    controller = Controller(config, [DevicePool(spec=spec, layers={"ring": rows})], runtime, registry)
    slots = controller.group.allocate({"full": 4})
    assert slots is not None
    controller.backup(slots["full"], torch.arange(4, 8)).wait()
    controller.load(slots["full"], torch.arange(16, 20)).wait()
    assert all(torch.equal(layer[4], layer[1]) for layer in rows)


def test_the_examples_are_as_short_as_they_claim() -> None:
    """Ten lines for an integrator, thirty for an author; imports and blank lines aside."""

    def lines(name: str) -> int:
        return len([x for x in example(name).splitlines() if x and not x.startswith(("import ", "from "))])

    assert lines("integrator") <= 10
    assert lines("author") <= 30


def test_the_hand_made_group_is_one(tmp_path: Path) -> None:
    """The file is read as it stands there, and its group works."""
    path = tmp_path / "pools.toml"
    path.write_text(example("pools", "toml"), encoding="utf-8")
    pair = ["--platform", "rocm-mi355x", "--io-backend", "kernel", "--layout", "page_first"]
    assert hicache("check", "--pools", path, *pair).exit_code == 0
    assert hicache("plan", "--pools", path, *pair, "--host-size", "1GiB").exit_code == 0


def test_the_questions_before_the_machines_arrive_are_answered() -> None:
    """Each command of that section runs as it stands there."""
    section = README.split("### Before the machines arrive")[1].split("<!-- test")[0].replace("\\\n", "")
    lines = [line.split() for line in section.splitlines() if line.startswith("hicache ")]
    assert [line[1] for line in lines] == ["check", "check", "plan"]
    for line in lines:
        assert hicache(*line[1:]).exit_code == 0


def test_every_command_is_in_the_readme() -> None:
    """The table of commands lists all that there are."""
    for name in main.list_commands(Context(main)):
        assert f"`hicache {name}" in README
