"""Which tests and examples a change reaches, for .ci/run: by what they import, from the last commit that is known to be good.

    python -m tools.affected           # why, and a line for each step of CI: its name and the files to run, if there are any
    python -m tools.affected --good    # remembers this commit as good, if nothing in the checkout differs from it

Known to be good are CI_BASE, main (the remote's, or the one here), and what ``--good`` remembered in RING_ATTN_PROGRAMS_OF_TESTS;
the one nearest to HEAD counts. Without any, with CI_ALL=1, or if a file changed of which it is not known who reads it: everything.
"""

import ast
import fnmatch
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from tools.import_graph import PACKAGES, ROOT, module_name, resolved

FOLDERS = (*PACKAGES, "tests", "examples", "benchmarks", "tools")
WITH_INTEGRATIONS = ("examples/finetune_transformers.py", "examples/packed_sft.py", "examples/long_context.py")
INTERPRETED = (
    "tests/jax_core/kernels/test_triton.py",
    "tests/jax_core/kernels/test_kernel_bounds.py",
    "tests/torch_bridge/attention/test_decoding.py",
    "tests/ring_attn/test_passes.py",
    "tests/ring_attn/test_sums.py",
)
SEPARATE_ENVIRONMENTS = ("tests/gpu/*", "tests/integrations/*", *INTERPRETED)
# The steps of .ci/run that can be left out: patterns of what they run, and of what they do not.
STEPS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "test-cpu": (("tests/test_*.py", "tests/**/test_*.py"), SEPARATE_ENVIRONMENTS),
    "test-triton": (INTERPRETED, ()),
    "test-fast": (
        (
            "tests/torch_bridge/**/test_*.py",
            "tests/ring_attn/test_*.py",
            "tests/ring_attn/**/test_*.py",
            "tests/jax_core/api/test_transforms.py",
            "tests/jax_core/strategies/test_empty_arrays.py",
        ),
        SEPARATE_ENVIRONMENTS,
    ),
    "test-gpu-aot": (("tests/jax_core/strategies/test_gpu_program.py",), ()),
    "test-oldest-triton": (("tests/jax_core/kernels/test_triton_compiles.py",), ()),
    "test-tpu": (("tests/jax_core/strategies/test_tpu_program.py", "tests/jax_core/strategies/test_fused_ring.py"), ()),
    "examples": (("examples/*.py",), (*WITH_INTEGRATIONS, "examples/torch_xla_tpu.py")),
    "test-integrations": (("tests/integrations/test_*.py",), ()),
    "examples-integrations": (WITH_INTEGRATIONS, ()),
}
DOCUMENTATION = ("*.md", "docs/*", "benchmarks/results/*", "benchmarks/*.png", "CITATION.cff", "LICENSE", "mkdocs.yml")
# What chooses where the tests run, and how: everything follows it. So does all that these import.
OF_ALL_TESTS = (
    "tests/conftest.py",
    "tests/**/conftest.py",
    "tests/support/launch.py",
    "tests/support/forked.py",
    "tools/affected.py",
    # What keeps programs that tests compile.
    "torch_bridge/start/compilation_cache.py",
    "jax_core/caches.py",
)
# The library chooses these on hardware alone. On a CPU they do something where a test says one of the words.
ON_HARDWARE = {
    "jax_core/kernels/cudnn": r"cudnn|CUDNN|cuDNN|['\"]cuda['\"]",
    "jax_core/kernels/cute": r"\b(cute|CUTE)\b|_cute|cute_|flash.attn.4",
    "jax_core/kernels/tpu": r"(?<!u)tpu|TPU|[Pp]allas",
    "jax_core/kernels/triton": r"[Tt]riton|TRITON",
    "jax_core/strategies/fused_ring": r"['\"]fused['\"]|[Ff]used.?[Rr]ing|(?<!u)tpu|TPU",
}
CHOOSER, ASKS_ALL = "jax_core/request/dispatch.py", r"KERNELS|STRATEGIES|CAPABILITIES|support_matrix|[Ee]xplain|doctor"
PRELOADS = "tests/support/forked.py"  # only imports: what a worker runs, it says itself
WALKS, OF_THE_TREE = re.compile(r"glob\(|iterdir\(|listdir\(|os\.walk\("), re.compile(r"\b(ROOT|TESTS|Path\(__file__\))")
WORD = re.compile(r"[A-Za-z_][\w./-]*\w")


class Change(NamedTuple):
    path: str
    gone: bool = False


class Plan(NamedTuple):
    reason: str
    steps: dict[str, list[str]]  # by a step's name the files that it runs


class Tree:
    """The Python files of a checkout, and which of them each uses."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        paths = sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))
        self.sources = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}
        self.modules = {module_name(ROOT / name): name for name in self.sources}
        self.by_file_name: dict[str, set[str]] = {}
        for name in self.sources:
            self.by_file_name.setdefault(name.rpartition("/")[2], set()).add(name)

    @cached_property
    def exports(self) -> dict[str, dict[str, str]]:
        """By package what it hands on, and the file that it takes it from."""
        packages = [module for module, name in self.modules.items() if name.endswith("__init__.py")]
        return {package: dict(self._handed_on(package)) for package in packages}

    def _handed_on(self, package: str) -> Iterator[tuple[str, str]]:
        for node in ast.walk(ast.parse(self.sources[self.modules[package]])):
            if isinstance(node, ast.ImportFrom):
                base = resolved(node, package, True)
                for alias in node.names:
                    file = self.modules.get(f"{base}.{alias.name}", self.modules.get(base))
                    if file is not None:
                        yield alias.asname or alias.name, file

    def named(self, name: str) -> set[str]:
        """The files that a dotted name means: a module, or what a package hands on; of a longer name its longest part."""
        parts = name.split(".")
        for count in range(len(parts), 0, -1):
            module = ".".join(parts[:count])
            if module in self.modules:
                rest = parts[count] if count < len(parts) else None
                return {self.exports.get(module, {}).get(rest or "", self.modules[module])}
        return {file for file in self.by_file_name.get(f"{parts[0]}.py", ()) if file.startswith(("tests/", "examples/"))}

    def uses(self, file: str) -> set[str]:
        """What a file imports or, outside the library, names in its strings: programs that it starts, modules that it patches."""
        tree = ast.parse(self.sources[file])
        used = {each for name in self._imports(tree, file) for each in self.named(name)}
        for text in strings(tree):
            if not file.startswith(PACKAGES):
                used |= self._named_in(text)
            elif text in self.modules and "." in text:
                used.add(self.modules[text])
        return used - {file}

    def _imports(self, tree: ast.AST, file: str) -> Iterator[str]:
        module, is_package = module_name(ROOT / file), file.endswith("__init__.py")
        bound: dict[str, str] = {}  # names of packages in this file
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                names = [(f"{resolved(node, module, is_package)}.{alias.name}", alias.asname or alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [(alias.name, alias.asname or alias.name) for alias in node.names]
            else:
                continue
            for name, local in names:
                if name in self.exports:
                    bound[local] = name
                else:
                    yield name
                    if isinstance(node, ast.Import) and "." in local:
                        bound |= {local.partition(".")[0]: name.partition(".")[0]}
        yield from used_of_packages(tree, {local: name for local, name in bound.items() if name in self.exports})

    def _named_in(self, text: str) -> set[str]:
        files: set[str] = set()
        for word in WORD.findall(text):
            if word.endswith(".py"):
                pattern = word.rpartition("/")[2]  # the end of a name that is put together: *_worker.py
                names = fnmatch.filter(self.by_file_name, f"*{pattern}" if pattern.startswith("_") else pattern)
                files |= {file for name in names for file in self.by_file_name[name] if "/test_" not in file}
            elif word.partition(".")[0] in FOLDERS and "/" not in word:
                files |= self.named(word) | {self.modules[name] for name in (f"{word}.__main__",) if name in self.modules}
        return files

    @cached_property
    def graph(self) -> dict[str, set[str]]:
        graph = {file: self.uses(file) for file in self.sources}
        graph[CHOOSER] = {file for file in graph[CHOOSER] if not file.startswith(tuple(ON_HARDWARE))}
        graph[PRELOADS] = {file for file in graph[PRELOADS] if file.startswith("tests/")}
        return graph

    def reached(self, roots: Iterable[str]) -> set[str]:
        reached = set(roots)
        todo = list(reached)
        while todo:
            new = self.graph[todo.pop()] - reached
            reached |= new
            todo.extend(new)
        return reached

    @cache  # noqa: B019 - a Tree lives as long as the process
    def reached_by(self, file: str) -> frozenset[str]:
        """All that running a test or an example may run: hardware's kernels only if it, or what it uses of the tests, says so."""
        reached = self.reached([file])
        said = "\n".join(self.sources[name] for name in reached if not name.startswith(PACKAGES))
        by_name = [folder for folder, words in ON_HARDWARE.items() if re.search(f"{words}|{ASKS_ALL}", said)]
        if CHOOSER in reached:
            reached |= self.reached(name for folder in by_name if (name := f"{folder}/__init__.py") in self.sources)
        return frozenset(reached | {package for name in reached for package in self._packages(name)})

    def _packages(self, file: str) -> Iterator[str]:
        """The files of the packages that a file is in: an import runs them."""
        folders = file.split("/")[:-1]
        names = ("/".join([*folders[:count], "__init__.py"]) for count in range(1, len(folders) + 1))
        return (name for name in names if name in self.sources)

    def runs(self, step: str) -> list[str]:
        wanted, unwanted = STEPS[step]
        return [file for file in self.sources if matches(file, wanted) and not matches(file, unwanted)]

    @cached_property
    def of_all_tests(self) -> set[str]:
        named = {file for file in self.sources if matches(file, OF_ALL_TESTS)}
        return named | {file for file in self.reached(named) if not file.startswith(PACKAGES)}


def strings(tree: ast.AST) -> Iterator[str]:
    """The constants of a source that are no docstrings."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.value


def used_of_packages(tree: ast.AST, packages: Mapping[str, str]) -> Iterator[str]:
    """Of packages by the names that a source gives them: ``package.attribute`` where it takes that, the package where it does
    anything else with it."""
    taken = {
        id(node.value): f"{packages[node.value.id]}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in packages
    }
    yield from taken.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in packages and id(node) not in taken:
            yield packages[node.id]


def matches(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def plan(changes: Iterable[Change], tree: Tree, since: str) -> Plan:
    """What to run after these changes. ``since``: of what they are changes, in words."""
    changes = list(changes)
    everything = next((reason for change in changes if (reason := unknown(change, tree))), None)
    if everything is not None:
        return Plan(f"everything: {everything}, changed since {since}", {step: tree.runs(step) for step in STEPS})
    steps = {step: [file for file in tree.runs(step) if any(reaches(file, change, tree) for change in changes)] for step in STEPS}
    return Plan(f"what is reached by {len(changes)} files that have changed since {since}", steps)


def unknown(change: Change, tree: Tree) -> str | None:
    """Why nothing can be left out after a change, or None."""
    path = change.path
    if matches(path, DOCUMENTATION):
        return None
    if change.gone:
        return None if path.startswith("tests/") and "/test_" in path else f"{path}, which is gone"
    if path not in tree.sources:
        return f"{path}, of which nothing is known"
    if path in tree.of_all_tests:
        return f"{path}, which all tests use"
    tried = any(path in tree.reached_by(file) for step in STEPS for file in tree.runs(step))
    return (
        None if tried or path.startswith(("benchmarks/", "examples/", "tools/", "tests/gpu/")) else f"{path}, which no test imports"
    )


def walks(source: str) -> bool:
    return bool(WALKS.search(source) and OF_THE_TREE.search(source))


def reaches(file: str, change: Change, tree: Tree) -> bool:
    """Whether a test or an example would run a changed file, or read it: what walks over folders reads anything."""
    users = [name for name in tree.reached_by(file) if name.startswith(("tests/", "examples/", "tools/"))]
    if walks(tree.sources[file]) and file.startswith("tests/"):
        return True
    if change.path in tree.sources:
        return change.path in tree.reached_by(file)
    return any(change.path.rpartition("/")[2] in tree.sources[name] for name in users)


def git(*arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def remembered() -> Path | None:
    folder = os.environ.get("RING_ATTN_PROGRAMS_OF_TESTS", "")
    return Path(folder) / "good-commits" if folder not in ("", "off") else None


def base() -> str | None:
    """The nearest commit before HEAD that is known to be good."""
    file = remembered()
    given = [os.environ.get("CI_BASE", ""), *(file.read_text().split() if file is not None and file.exists() else [])]
    good = [commit for commit in given if commit and git("merge-base", "--is-ancestor", commit, "HEAD") is not None]
    good += [commit for branch in ("origin/main", "main") if (commit := git("merge-base", branch, "HEAD"))]
    head = git("rev-parse", "HEAD")
    distances = {commit: int(git("rev-list", "--count", f"{commit}..HEAD") or 0) for commit in good if commit != head}
    return min(distances, key=distances.__getitem__, default=None)


def changed(since: str) -> Iterator[Change] | None:
    """What differs from a commit in this checkout, committed or not."""
    differing = git("diff", "--name-status", "--no-renames", "-z", since)
    new = git("ls-files", "--others", "--exclude-standard", "-z")
    if differing is None or new is None:
        return None
    fields = differing.strip("\0").split("\0") if differing else []
    status = [Change(path, gone=kind == "D") for kind, path in zip(fields[::2], fields[1::2], strict=True)]
    return iter([*status, *(Change(path) for path in new.split("\0") if path)])


def plan_of_checkout(tree: Tree) -> Plan:
    everything = {step: tree.runs(step) for step in STEPS}
    if os.environ.get("CI_ALL") == "1":
        return Plan("everything: CI_ALL=1", everything)
    since = base()
    changes = changed(since) if since else None
    if since is None or changes is None:
        return Plan("everything: no commit before this one is known to be good", everything)
    return plan(changes, tree, since[:12])


def remember() -> None:
    file, head = remembered(), git("rev-parse", "HEAD")
    if file is not None and head and git("status", "--porcelain") == "":
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as lines:
            lines.write(f"{head}\n")


def main() -> None:
    if sys.argv[1:] == ["--good"]:
        remember()
        return
    reason, steps = plan_of_checkout(Tree())
    print(reason)
    for step, files in steps.items():
        print(step, *files)


if __name__ == "__main__":
    main()
