"""What the README and the examples tell a reader to run: it runs as printed, or says what to do."""

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Whole programs; the lines without imports are run by tests/integrations/test_readme.py.
SNIPPETS = [text for text in re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL) if "import" in text]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """In a Python that knows nothing of this one's settings."""
    kept = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS", "RANK")}
    environment = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def is_torch(snippet: str) -> bool:
    return "torch.distributed" in snippet


def test_the_readme_has_snippets_of_both_kinds():
    assert [is_torch(snippet) for snippet in SNIPPETS] == [True, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("snippet", SNIPPETS, ids=["torch module", "torch function", "jax"])
def test_a_snippet_runs_as_printed(snippet: str, tmp_path: Path):
    """Under torchrun, or on four CPU devices: no error, and a line that shows what was done."""
    script = tmp_path / "train.py"
    script.write_text(snippet, encoding="utf-8")
    if is_torch(snippet):
        done = run(*TORCHRUN, script)
        said = "right: train, 2 steps" if "verify(" in snippet else r".*\d"
        wanted = [rf"process {rank}: {said}" for rank in range(2)]
    else:
        done = run(script, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="4")
        wanted = [r"\(1, 4096, 8, 64\) over 4 devices, (0\.0e\+00|\d\.\de-0[6-9]) apart"]
    assert done.returncode == 0, done.stdout + done.stderr
    for line in wanted:
        assert re.search(line, done.stdout), done.stdout + done.stderr


def commands() -> list[str]:
    """The shell lines of README.md and CONTRIBUTING.md: the indented ones, and the commands within sentences."""
    text = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md"))
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    indented = [line.split("#")[0].strip() for line in re.findall(r"^ {4}(\S.*)$", text, re.MULTILINE)]
    return sorted({*indented, *re.findall(r"`((?:python|make|pip) [^`]*)`", text)})


def test_commands_name_what_is_there():
    """Make's targets, and scripts of this repository. What they do is run by CI, or above."""
    assert len(commands()) > 10
    for command in commands():
        program, *words = shlex.split(command)
        if program == "make":
            targets = [word for word in words if "=" not in word]
            done = subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{command}: {done.stderr}"
        else:
            assert program in ("python", "pip", "torchrun", ".ci/run"), command
            assert all((ROOT / word).exists() for word in [program, *words] if "/" in word), command


# ---------------------------------------------------------------------------------------------------------------- examples

BARE = {
    "torch_minimal.py": "torchrun --standalone --nproc-per-node 2 examples/torch_minimal.py",
    "train_on_tpu.py --device cpu": "torchrun --standalone --nproc-per-node 2 examples/train_on_tpu.py --device cpu",
    "train_on_tpu.py": "pip install .*torch-tpu",
    "torch_xla_tpu.py": r"make xla, then .venv-xla/bin/python .*examples/torch_xla_tpu.py",
}


@pytest.mark.parametrize("command", BARE)
def test_an_example_that_lacks_something_says_how_to_start_it(command: str):
    """In one line, and it does not pass for done."""
    if (command == "train_on_tpu.py" and find_spec("torch_tpu")) or (command == "torch_xla_tpu.py" and find_spec("torch_xla")):
        pytest.skip("what it would lack is here")
    name, *arguments = command.split()
    done = run(ROOT / "examples" / name, *arguments)
    assert done.returncode != 0
    assert re.fullmatch(f".*{BARE[command]}.*\n", done.stderr), done.stderr
