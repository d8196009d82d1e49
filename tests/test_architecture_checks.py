"""Each rule of the source tree catches what it forbids, and lets its neighbours pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import architecture_checks as checks

Tree = Callable[..., list[checks.Module]]
STEMS = ("mha", "mla", "dsv4", "dsa", "mamba")
FAMILIES = {"mha_mla", "k_only"}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Writes a package from ``path=source`` pairs and loads it."""

    def write(package: str, **sources: str) -> list[checks.Module]:
        for name, source in sources.items():
            path = tmp_path / package / f"{name.replace('__in__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source, encoding="utf-8")
        return checks.load(tmp_path / package)

    return write


@pytest.mark.parametrize(
    "source",
    [
        "import hicache_mha_mla",
        "import hicache_mha_mla.pool as pool",
        "from hicache_mha_mla import pool",
        "def late():\n    from hicache_mha_mla.pool import declare\n",
        "if TYPE_CHECKING:\n    import hicache_mha_mla\n",
    ],
)
def test_plugin_import_of_the_core_is_caught(tree: Tree, source: str) -> None:
    """At every level of a module, for type checkers too."""
    assert len(checks.plugin_imports_of_core(tree("hicache_core", a=source), {"hicache_mha_mla"})) == 1


def test_core_import_of_the_core_passes(tree: Tree) -> None:
    """Names that only begin like a plugin are not plugins."""
    core = tree("hicache_core", a="from . import b\nimport hicache_core.b, hicache_mha_mlab", b="")
    assert checks.plugin_imports_of_core(core, {"hicache_mha_mla"}) == []


@pytest.mark.parametrize(
    "source",
    [
        "mha = 1",
        "class MHAPool: ...",
        "def f(dsv4_rows): ...",
        "f(is_mla=True)",
        "x.mamba_slots",
        "x = 'mamba'",
        "x = f'{y} for dsa'",
        "x = b'mla'",
        "x = 'deepseek dsv41'",
        "x = 'k_only'",
        "KOnly = 1",
        "import a as mla",
        "from mla import a",
        "def f():\n    global mla\n",
    ],
)
def test_family_name_in_core_is_caught(tree: Tree, source: str) -> None:
    """In identifiers and strings, as a part of a word's chain."""
    assert checks.family_names_in_core(tree("hicache_core", a=source), FAMILIES, STEMS)


def test_family_name_of_a_module_is_caught(tree: Tree) -> None:
    """A file may not be named after a family either."""
    assert checks.family_names_in_core(tree("hicache_core", mamba=""), FAMILIES, STEMS)


@pytest.mark.parametrize(
    "source",
    [
        '"""Prose may say mamba."""',
        'class A:\n    """Prose of MLA."""\n    x = 1\n    """And of mha."""\n',
        "x = 1  # unlike dsv4",
        "x = 'only k'",
        "disable_all = formla = 1",
    ],
)
def test_prose_and_other_words_pass(tree: Tree, source: str) -> None:
    """Docstrings and comments explain; words that merely hold the letters are others."""
    assert checks.family_names_in_core(tree("hicache_core", a=source), FAMILIES, STEMS) == []


@pytest.mark.parametrize(
    "source",
    [
        "import hicache_core.device.cuda",
        "from hicache_core import device",
        "from hicache_core.cli import main",
        "from hicache_core.replay.report import Report",
        "from hicache_core import _private",
        "from hicache_core.memory._arena import Arena",
        "from hicache_core.spec import _hidden",
        "import hicache_b",
        "from hicache_b.pool import declare",
    ],
)
def test_private_import_of_a_plugin_is_caught(tree: Tree, source: str) -> None:
    """Modules of the core that are its own affair, private names, other plugins."""
    assert len(checks.private_imports_of_plugin(tree("hicache_a", x=source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import hicache_core",
        "from hicache_core.spec import PoolSpec",
        "from hicache_a._rows import row",
        "from ._rows import row",
        "import torch",
    ],
)
def test_public_import_of_a_plugin_passes(tree: Tree, source: str) -> None:
    """The core's public modules, the plugin's own and third parties'."""
    assert checks.private_imports_of_plugin(tree("hicache_a", x=source, _rows="")) == []


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("import pkg.b", "import pkg.a"),
        ("from pkg import b", "from pkg.a import x"),
        ("from . import b", "from .a import x"),
        ("from .b import y", "try:\n    from .a import x\nexcept ImportError:\n    pass\n"),
        ("from .b import y", "class B:\n    from .a import x\n"),
    ],
)
def test_import_cycle_is_caught(tree: Tree, a: str, b: str) -> None:
    """Through absolute and relative imports, in whatever block runs at import."""
    (cycle,) = checks.import_cycles(tree("pkg", a=a, b=b, __init__=""))
    assert {"pkg.a", "pkg.b"} == set(cycle.split(" -> "))


def test_import_cycle_through_a_package_is_caught(tree: Tree) -> None:
    """A submodule that imports from the facade above it."""
    facade, below = "from .a import A", "from pkg.sub import B"
    assert checks.import_cycles(tree("pkg", __init__="", sub__in____init__=facade, sub__in__a=below))


@pytest.mark.parametrize(
    "late",
    [
        "def f():\n    from .a import x\n",
        "if TYPE_CHECKING:\n    from .a import x\n",
        "if typing.TYPE_CHECKING:\n    from .a import x\n",
    ],
)
def test_imports_that_do_not_run_make_no_cycle(tree: Tree, late: str) -> None:
    """Late imports and those for type checkers."""
    modules = tree("pkg", a="from .b import y", b=late, __init__="from . import a, b")
    assert checks.import_cycles(modules) == []


@pytest.mark.parametrize(
    "source",
    [
        "if layout == 'page_first': pass",
        "if x and spec.layout.name != 'page_first': pass",
        "if 'direct' == io_backend: pass",
        "if a:\n    pass\nelif self.io_backend in ('kernel', 'direct'):\n    pass\n",
        "y = 1 if platform.vendor == 'amd' else 2",
        "while host_layout == 'layer_first': pass",
        "if layout is LAYER_FIRST: pass",
        "if layout is Layout.LAYER_FIRST: pass",
        "if 'rocm' in platform.name: pass",
        "if platform.name.startswith('rocm'): pass",
        "if spec.family in {'a'}: pass",
        "match layout:\n    case 'page_first': pass\n",
        "match geometry.family:\n    case _: pass\n",
    ],
)
def test_ladder_is_caught(tree: Tree, source: str) -> None:
    """Comparisons with names, with constants that stand for names, and parts of names."""
    assert len(checks.ladders(tree("pkg", a=source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "if layout is None: pass",
        "if layout not in LAYOUTS: pass",
        "if (io_backend, layout.name) in served: pass",
        "if layout == other.layout: pass",
        "if platform.registers: pass",
        "if unit is RowUnit.PAGE: pass",
        "if layouts == 'many': pass",
        "way = WAYS[io_backend, layout.name]",
    ],
)
def test_tables_and_facts_pass(tree: Tree, source: str) -> None:
    """Lookups, facts of a platform and comparisons of two values."""
    assert checks.ladders(tree("pkg", a=source)) == []


def test_long_file_is_caught(tree: Tree) -> None:
    """At one line over, not at the budget."""
    modules = tree("pkg", a="x = 1\n" * checks.FILE_LINES, b="x = 1\n" * (checks.FILE_LINES + 1))
    (violation,) = checks.long_files(modules)
    assert "b.py" in violation


def _function(name: str, lines: int) -> str:
    return f"def {name}():\n" + "    x = 1\n" * (lines - 1)


def test_long_function_is_caught(tree: Tree) -> None:
    """At one line over, methods too; short functions around it keep the percentile."""
    short = "".join(_function(f"f{i}", 2) for i in range(20))
    method = "class A:\n" + "".join(f"    {line}\n" for line in _function("long", 61).splitlines())
    (violation,) = checks.long_functions(tree("pkg", a=short + _function("full", 60) + method))
    assert "long has 61 lines" in violation


@pytest.mark.parametrize(("long", "violations"), [(1, 0), (2, 1)])
def test_percentile_of_function_lengths_is_kept(tree: Tree, long: int, violations: int) -> None:
    """One function in ten may be longer than the others."""
    short = "".join(_function(f"s{i}", 25) for i in range(10 - long))
    source = short + "".join(_function(f"l{i}", 26) for i in range(long))
    assert len(checks.long_functions(tree("pkg", a=source))) == violations


def _statements(count: int) -> str:
    return "".join(f"x{i} = {i}\n" for i in range(count))


def test_copied_run_is_caught(tree: Tree) -> None:
    """Whatever indentation, comments and blank lines stand between."""
    body = "".join(f"    {line}  # copied\n\n" for line in _statements(6).splitlines())
    plugins = {"a": tree("hicache_a", x=_statements(6)), "b": tree("hicache_b", y=f"def f():\n{body}")}
    assert len(checks.copied_runs(plugins)) == 1


@pytest.mark.parametrize(
    "source",
    [
        _statements(5),
        "".join(f"import m{i}\n" for i in range(9)),
        '"""' + "A line of prose.\n" * 9 + '"""',
        "@hookimpl\ndef hook(\n    a,\n    b,\n    c,\n    d,\n):\n    return 1\n",
    ],
)
def test_short_runs_and_dictated_lines_pass(tree: Tree, source: str) -> None:
    """Five lines, imports, docstrings and the signatures of hooks."""
    assert checks.copied_runs({"a": tree("hicache_a", x=source), "b": tree("hicache_b", x=source)}) == []


def test_copies_within_one_plugin_pass(tree: Tree) -> None:
    """The rule is about what the core should hold; a plugin's own shape is its own affair."""
    assert checks.copied_runs({"a": tree("hicache_a", x=_statements(9), y=_statements(9))}) == []


def test_declared_families_are_read_from_source(tree: Tree) -> None:
    """By the name argument of each declaration."""
    source = "F = (Family(name='k_only', api=(1, 1)), hookspecs.Family(name='kv'), Other(name='x'))"
    assert checks.declared_families(tree("hicache_a", plugin=source)) == {"k_only", "kv"}


def test_words_split_at_case_and_signs() -> None:
    """Camel case, runs of capitals, digits, dashes."""
    assert checks.words("MHAPool_v2-fooBar DSV4Paged") == ["mha", "pool", "v2", "foo", "bar", "dsv4", "paged"]
