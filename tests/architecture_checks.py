"""The rules of the source tree, as functions from modules to violations (``path:line: what``)."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from math import ceil
from pathlib import Path

from attrs import frozen

CORE = "hicache_core"
FILE_LINES = 400
FUNCTION_LINES = 60
FUNCTION_LINES_P90 = 25
COPIED_RUN_LINES = 6
PRIVATE_CORE = (["cli"], ["device"], ["replay"])
LADDER_SUBJECTS = ("layout", "io_backend", "backend", "platform", "vendor", "family")

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@frozen(kw_only=True)
class Module:
    """A parsed source file.

    Args:
        name: dotted name; a package's own name for its ``__init__``.
        path: where it lies.
        source: its text.
        tree: its syntax tree.
    """

    name: str
    path: Path
    source: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """The package that relative imports start from."""
        return self.name if self.path.stem == "__init__" else self.name.rpartition(".")[0]

    def at(self, node: ast.AST | int, what: str) -> str:
        """A violation at a node or line."""
        line = node if isinstance(node, int) else getattr(node, "lineno", 1)
        return f"{self.path}:{line}: {what}"


def load(package: Path) -> list[Module]:
    """Every module under a package's folder."""
    modules = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        source = path.read_text(encoding="utf-8")
        modules.append(Module(name=name, path=path, source=source, tree=ast.parse(source)))
    return modules


# Imports


def _targets(module: Module, node: ast.AST) -> list[str]:
    """Absolute dotted names that an import statement asks for: ``from a import b`` asks for ``a.b``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        parts = module.package.split(".")
        base = ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])
    return [f"{base}.{alias.name}" for alias in node.names]


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _nodes_run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Function | ast.Lambda):
            continue
        if isinstance(child, ast.If) and _is_type_checking(child):
            for other in child.orelse:
                yield other
                yield from _nodes_run_at_import(other)
            continue
        yield child
        yield from _nodes_run_at_import(child)


def plugin_imports_of_core(core: Iterable[Module], plugin_packages: Collection[str]) -> list[str]:
    """The core never imports a plugin, at whatever level."""
    return [
        module.at(node, f"the core imports {target}")
        for module in core
        for node in ast.walk(module.tree)
        for target in _targets(module, node)
        if target.split(".")[0] in plugin_packages
    ]


def private_imports_of_plugin(plugin: Iterable[Module]) -> list[str]:
    """A plugin imports the core's public modules only, and no other plugin."""

    def reason(module: Module, target: str) -> str | None:
        top, *inner = target.split(".")
        if top == CORE:
            private = inner[:1] in PRIVATE_CORE or any(part.startswith("_") for part in inner)
            return "is private to the core" if private else None
        other = top.startswith("hicache_") and top != module.name.split(".")[0]
        return "is another plugin" if other else None

    return [
        module.at(node, f"imports {target}, which {why}")
        for module in plugin
        for node in ast.walk(module.tree)
        for target in _targets(module, node)
        if (why := reason(module, target))
    ]


def import_cycles(modules: Sequence[Module]) -> list[str]:
    """A cycle among the imports that run when modules are imported, as ``a -> b -> a``; none: empty."""
    names = {module.name for module in modules}
    graph: dict[str, set[str]] = {}
    for module in modules:
        found = graph.setdefault(module.name, set())
        for node in _nodes_run_at_import(module.tree):
            for target in _targets(module, node):
                found.add(target if target in names else target.rpartition(".")[0])
    edges = {name: (targets & names) - {name} for name, targets in graph.items()}
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return [" -> ".join(reversed(error.args[1]))]
    return []


# Names


def words(text: str) -> list[str]:
    """Word parts of an identifier or a text: ``MHAPool_v2`` gives mha, pool, v2."""
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", text)
    return [word for word in re.split(r"[^a-z0-9]+", split.lower()) if word]


def declared_families(plugin: Iterable[Module]) -> set[str]:
    """Names of the families that a plugin declares: ``Family(name="...")``."""
    return {
        keyword.value.value
        for module in plugin
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Family")
        for keyword in node.keywords
        if keyword.arg == "name"
        and isinstance(keyword.value, ast.Constant)
        and isinstance(keyword.value.value, str)
    }


def _names_family(text: str, families: Iterable[str], stems: Sequence[str]) -> bool:
    found = words(text)
    if any(word.startswith(tuple(stems)) for word in found):
        return True
    joined = f"_{'_'.join(found)}_"
    return any(f"_{'_'.join(words(family))}_" in joined for family in families)


def _texts(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Identifiers and string literals of code; docstrings and other bare strings are prose."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in prose and isinstance(node, ast.Constant):
            continue
        for _, value in ast.iter_fields(node):
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str | bytes):
                    yield node, text if isinstance(text, str) else text.decode("latin-1")


def family_names_in_core(
    core: Iterable[Module], families: Collection[str], stems: Sequence[str]
) -> list[str]:
    """The core's code names no family.

    Args:
        core: the core's modules.
        families: full names, matched as runs of words.
        stems: beginnings of words that no identifier and no string may have.
    """
    found = []
    for module in core:
        if _names_family(module.name, families, stems):
            found.append(module.at(1, f"module {module.name} names a family"))
        found += [
            module.at(node, f"{text!r} names a family")
            for node, text in _texts(module.tree)
            if _names_family(text, families, stems)
        ]
    return found


# Ladders


def _chain(node: ast.expr) -> list[str]:
    """``spec.layout.name`` as a list; the middle of a call or subscript counts as its value."""
    if isinstance(node, ast.Attribute):
        return [*_chain(node.value), node.attr]
    if isinstance(node, ast.Call):
        return _chain(node.func)
    return [node.id] if isinstance(node, ast.Name) else []


def _is_subject(node: ast.expr) -> bool:
    """Whether an expression is a layout, backend, platform, vendor or family, or its name."""
    readings = {"name", "value", "kind", "lower", "casefold", "strip", "startswith", "endswith"}
    chain = _chain(node)
    while len(chain) > 1 and chain[-1] in readings:
        chain.pop()
    last = chain[-1].lower() if chain else ""
    return any(last == subject or last.endswith(f"_{subject}") for subject in LADDER_SUBJECTS)


def _is_choice(node: ast.expr) -> bool:
    """Whether an expression is a literal name, a constant that stands for one, or a collection of such."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(_is_choice(element) for element in node.elts)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    chain = [] if isinstance(node, ast.Call) else _chain(node)
    return bool(chain) and chain[-1].isupper()


def _compares(op: ast.cmpop, left: ast.expr, right: ast.expr) -> bool:
    if isinstance(op, ast.In | ast.NotIn) and not isinstance(right, ast.Tuple | ast.List | ast.Set):
        # A lookup in a table is how it should be; a part of a name is a branch again.
        return _is_subject(right) and isinstance(left, ast.Constant)
    return (_is_subject(left) and _is_choice(right)) or (_is_subject(right) and _is_choice(left))


def _asks(test: ast.expr) -> bool:
    for node in ast.walk(test):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(map(_compares, node.ops, sides, sides[1:])):
                return True
        if isinstance(node, ast.Call) and _chain(node.func)[-1:] in (["startswith"], ["endswith"]):
            return _is_subject(node.func)
    return False


def ladders(modules: Iterable[Module]) -> list[str]:
    """No branch asks which layout, backend, platform, vendor or family it has."""
    found = []
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.If | ast.IfExp | ast.While) and _asks(node.test):
                found.append(module.at(node, f"a branch on {ast.unparse(node.test)}"))
            if isinstance(node, ast.Match) and _is_subject(node.subject):
                found.append(module.at(node, f"a match on {ast.unparse(node.subject)}"))
    return found


# Budgets


def long_files(modules: Iterable[Module]) -> list[str]:
    """A file has up to 400 lines."""
    return [
        module.at(FILE_LINES + 1, f"{lines} lines, budget {FILE_LINES}")
        for module in modules
        if (lines := len(module.source.splitlines())) > FILE_LINES
    ]


def _functions(modules: Iterable[Module]) -> list[tuple[Module, _Function, int]]:
    return [
        (module, node, (node.end_lineno or node.lineno) - node.lineno + 1)
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, _Function)
    ]


def long_functions(modules: Iterable[Module]) -> list[str]:
    """A function has up to 60 lines, docstring included, and nine in ten have up to 25."""
    functions = _functions(modules)
    found = [
        module.at(node, f"{node.name} has {lines} lines, budget {FUNCTION_LINES}")
        for module, node, lines in functions
        if lines > FUNCTION_LINES
    ]
    lengths = sorted(lines for _, _, lines in functions)
    p90 = lengths[ceil(0.9 * len(lengths)) - 1] if lengths else 0
    if p90 > FUNCTION_LINES_P90:
        found.append(f"90th percentile of function lengths is {p90} lines, budget {FUNCTION_LINES_P90}")
    return found


# Copies


def _is_dictated(node: ast.AST) -> bool:
    """Imports and docstrings say nothing of how a thing is done."""
    return isinstance(node, ast.Import | ast.ImportFrom) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )


def _significant(module: Module) -> list[tuple[int, str]]:
    """Lines that hold code of the author's own; a hook's signature is dictated by its specification."""
    skipped: set[int] = set()
    for node in ast.walk(module.tree):
        if _is_dictated(node):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))  # type: ignore[attr-defined]
        if isinstance(node, _Function) and any("hookimpl" in ast.unparse(d) for d in node.decorator_list):
            skipped.update(range(node.decorator_list[0].lineno, node.body[0].lineno))
    lines = enumerate(module.source.splitlines(), start=1)
    kept = [(number, " ".join(line.split("#")[0].split())) for number, line in lines if number not in skipped]
    return [(number, line) for number, line in kept if re.search(r"\w", line)]


def _runs(module: Module) -> Iterator[tuple[int, tuple[str, ...]]]:
    lines = _significant(module)
    for start in range(len(lines) - COPIED_RUN_LINES + 1):
        run = lines[start : start + COPIED_RUN_LINES]
        yield run[0][0], tuple(line for _, line in run)


def copied_runs(plugins: Mapping[str, Iterable[Module]]) -> list[str]:
    """No six significant lines in a row stand in two plugins."""
    first: dict[tuple[str, ...], tuple[str, str]] = {}
    found = []
    for plugin, modules in plugins.items():
        for module in modules:
            for line, run in _runs(module):
                owner, place = first.setdefault(run, (plugin, module.at(line, "")))
                if owner != plugin:
                    found.append(module.at(line, f"{COPIED_RUN_LINES} lines as in {place.rstrip(': ')}"))
    return found


