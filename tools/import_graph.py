"""What Python files import, read from their source: for the rules of imports (tests/test_imports.py) and for which tests a change
reaches (tools/affected.py)."""

import ast
from collections.abc import Mapping, Set
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("ring_attn", "torch_bridge", "jax_core")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(source: str, module: str, is_package: bool = False) -> set[str]:
    """The absolute names that a source imports, wherever in it. ``from a import b`` gives both ``a`` and ``a.b``."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = resolved(node, module, is_package)
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        elif called(node) in ("import_module", "__import__") and isinstance(node, ast.Call):
            names |= {
                argument.value for argument in node.args if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            }
    return names


def called(node: ast.AST) -> str | None:
    if not isinstance(node, ast.Call):
        return None
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)


def resolved(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    above = module.split(".") + ([""] if is_package else [])
    return ".".join([*above[: -node.level], *([node.module] if node.module else [])])


def without_packages(names: Set[str]) -> set[str]:
    """``from package import module`` gives both names, and is an import of the module."""
    return {name for name in names if not any(other.startswith(name + ".") for other in names)}


class Pruned(ast.NodeTransformer):
    """A module without what is there for the type checker alone; and without its functions, where those are not to count."""

    def __init__(self, functions: bool) -> None:
        self.functions = functions

    def visit_If(self, node: ast.If) -> ast.AST:
        return ast.Pass() if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node if self.functions else ast.Pass()


def import_graph(sources: Mapping[str, tuple[str, bool]], deferring: Set[str] = frozenset()) -> dict[str, set[str]]:
    """Which of the modules (name -> source, is it a package) imports which other of them: at its top, or within a function unless
    it is one of ``deferring``."""
    graph = {}
    for module, (source, is_package) in sources.items():
        pruned = ast.unparse(Pruned(module not in deferring).visit(ast.parse(source)))
        graph[module] = without_packages(imported(pruned, module, is_package) & sources.keys()) - {module}
    return graph
