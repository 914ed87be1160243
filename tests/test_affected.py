"""Which steps of CI a change runs (tools/affected.py): what it reaches, and everything where that is not known."""

import re
import subprocess

import pytest

from tools import affected
from tools.affected import STEPS, Change, Tree, base, changed, plan

TREE, FOLDER = Tree(), "tests/jax_core"
EVERYTHING = {step: TREE.runs(step) for step in STEPS}
# Tests that walk over folders may read any file.
READERS = {"tests/test_affected.py"} | {
    file for files in EVERYTHING.values() for file in files if affected.walks(TREE.sources[file])
}


def steps(*paths: str) -> dict[str, set[str]]:
    return {step: set(files) for step, files in plan(map(Change, paths), TREE, "before").steps.items()}


def test_every_test_and_example_is_in_a_step():
    ran = {file for files in EVERYTHING.values() for file in files}
    tests = {file for file in TREE.sources if "/test_" in file and not file.startswith("tests/gpu/")}
    makefile = (affected.ROOT / "Makefile").read_text(encoding="utf-8")
    started = {f"examples/{name}.py" for loop in re.findall(r"for example in (.*?);", makefile) for name in loop.split()}
    started |= set(re.findall(r"examples/\w+\.py", makefile[makefile.index("\nexamples:") :]))
    assert tests | started <= ran
    assert all(EVERYTHING.values())


def test_what_triton_interprets_is_run_by_its_own_step_alone():
    """A file that is named is collected, whatever tests/conftest.py leaves out."""
    makefile, conftest = ((affected.ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", "tests/conftest.py"))
    for file in affected.INTERPRETED:
        assert [step for step, files in EVERYTHING.items() if file in files] == ["test-triton"]
        assert file in makefile
        assert file.removeprefix("tests/") in conftest


def test_pages_run_the_tests_that_read_them():
    ran = steps("docs/strategies.md", "docs/pictures/ring.svg")
    assert ran["test-cpu"] >= {"tests/test_readme.py", "tests/test_benchmarks.py"}
    assert set().union(*ran.values()) <= READERS
    assert "tests/integrations/test_readme.py" in steps("README.md")["test-integrations"]
    assert "tests/ring_attn/test_explain.py" in steps("docs/explain.md")["test-cpu"]


def test_a_package_runs_what_imports_anything_of_it():
    assert steps("ring_attn/__init__.py")["test-cpu"] >= {
        "tests/ring_attn/test_tiles.py",
        "tests/torch_bridge/call/test_autograd.py",
    }


def test_a_kernel_of_hardware_runs_what_names_it():
    ran = steps("jax_core/kernels/cute/kernel.py")
    assert "tests/jax_core/kernels/test_cute.py" in ran["test-cpu"]
    assert ran["test-gpu-aot"] == set(EVERYTHING["test-gpu-aot"])
    assert not ran["test-cpu"] & {"tests/ring_attn/test_loss.py", "tests/torch_bridge/backends/test_dlpack.py"}
    assert [ran[step] for step in ("test-tpu", "examples", "examples-integrations")] == [set()] * 3


def test_the_kernel_of_cpus_runs_all_that_calls_attention():
    ran = steps("jax_core/kernels/xla/kernel.py")
    assert ran["test-cpu"] >= {"tests/jax_core/api/test_attention.py", "tests/ring_attn/test_loss.py", "tests/test_readme.py"}
    assert all(ran.values())


def test_an_integration_runs_itself_and_its_examples():
    ran = steps("ring_attn/integrations/transformers/context.py")
    assert "tests/integrations/test_transformers.py" in ran["test-integrations"]
    assert ran["examples-integrations"] == set(affected.WITH_INTEGRATIONS)
    assert [ran[step] for step in ("test-triton", "test-gpu-aot", "test-tpu")] == [set()] * 3
    assert not {file for file in ran["test-cpu"] - READERS if file.startswith(("tests/jax_core/", "tests/torch_bridge/mesh/"))}


def test_what_a_package_hands_on_is_reached_where_it_is_used():
    """``import ring_attn`` alone does not use all of it; ``ring_attn.tiled`` does use tiles."""
    ran = steps("ring_attn/training/tiles.py")
    assert "tests/ring_attn/test_tiles.py" in ran["test-cpu"]
    assert "tests/torch_bridge/backends/test_dlpack.py" not in ran["test-cpu"]
    assert TREE.uses("tests/test_readme.py") >= {"tests/support/workers/coming_from_worker.py"}  # a program that it starts
    assert "tests/integrations/test_mistakes.py" in steps("tests/support/workers/verify_worker.py")["test-integrations"]


@pytest.mark.parametrize(
    "change",
    [
        *map(Change, (".ci/run", "Makefile", "pyproject.toml", "setup.py", "tools/environment.sh", "tools/import_graph.py")),
        *map(Change, ("tests/conftest.py", "tests/support/launch.py", "tests/support/effort.py", "tests/support/forked.py")),
        *map(Change, ("jax_core/tune/shipped/NVIDIA_H200.json", "jax_core/py.typed", "ring_attn/new.bin")),
        Change("jax_core/caches.py"),
        Change("jax_core/masks/static.py", gone=True),
    ],
    ids=lambda change: change.path,
)
def test_what_is_not_known_runs_everything(change: Change):
    reason, ran = plan([Change("docs/strategies.md"), change], TREE, "before")
    assert ran == EVERYTHING
    assert reason.startswith("everything: ") and change.path in reason


def test_a_module_that_no_test_imports_runs_everything():
    tree = Tree()
    tree.sources["ring_attn/new.py"] = ""
    assert plan([Change("ring_attn/new.py")], tree, "before").steps == {step: tree.runs(step) for step in STEPS}
    assert not any(plan([Change(f"{FOLDER}/test_old.py", gone=True)], tree, "before").steps["test-tpu"])


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with one commit on main; ``commit(name)`` makes another that adds a file."""
    monkeypatch.setattr(affected, "ROOT", tmp_path)
    for name in ("CI_ALL", "CI_BASE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RING_ATTN_PROGRAMS_OF_TESTS", str(tmp_path / ".git" / "programs"))

    def commit(name: str) -> str:
        (tmp_path / name).write_text(name)
        author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        for command in (("add", name), (*author, "commit", "-q", "-m", name)):
            subprocess.run(("git", *command), cwd=tmp_path, check=True)
        return affected.git("rev-parse", "HEAD") or ""

    subprocess.run(("git", "init", "-q", "-b", "main"), cwd=tmp_path, check=True)
    return commit


def test_what_is_compared_with(checkout, monkeypatch):
    landed = checkout("a")
    assert base() is None  # main itself: nothing before it is known
    assert affected.plan_of_checkout(TREE).steps == EVERYTHING
    affected.git("checkout", "-q", "-b", "work")
    checkout("b")
    assert base() == landed
    affected.remember()
    assert base() == landed  # HEAD is not compared with itself
    remembered = affected.git("rev-parse", "HEAD")
    given = checkout("c")
    assert base() == remembered
    checkout("d.md")
    monkeypatch.setenv("CI_BASE", given)
    assert base() == given
    (affected.ROOT / "new").write_text("")
    (affected.ROOT / "a").unlink()
    assert set(changed(given)) == {Change("d.md"), Change("new"), Change("a", gone=True)}
    affected.remember()  # not what differs from its commit
    assert (affected.ROOT / ".git" / "programs" / "good-commits").read_text().split() == [remembered]
    monkeypatch.setenv("CI_ALL", "1")
    assert affected.plan_of_checkout(TREE) == ("everything: CI_ALL=1", EVERYTHING)


def test_another_history_is_nothing_to_compare_with(checkout, monkeypatch):
    checkout("a")
    monkeypatch.setenv("CI_BASE", "0" * 40)
    assert base() is None
