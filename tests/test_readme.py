"""What the README and the examples tell a reader to run: it runs as printed, or says what to do."""

import re
import shlex
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from launch import as_a_user, torchrun

ROOT = Path(__file__).parent.parent
PAGES = {page.name: page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
# Blocks with a file's name are whole programs; those of transformers are run by tests/integrations/test_readme.py.
PROGRAMS = {
    f"{page}: {name}": text
    for page, whole in PAGES.items()
    for name, text in re.findall(r'^```python title="(\w+\.py)"\n(.*?)^```', whole, re.MULTILINE | re.DOTALL)
    if "import transformers" not in text and "from transformers" not in text
}
PRINTS = {
    "own-model.md: own.py": ["right: train, 2 steps of the optimizer"],
    "jax.md: ring.py": [r"\(1, 4096, 8, 64\) over 4 devices, (0\.0e\+00|\d\.\de-0[6-9]) apart"],
}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def test_every_program_of_the_pages_has_what_it_prints():
    assert set(PROGRAMS) == set(PRINTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTS)
def test_a_program_of_the_pages_runs_as_printed(name: str, tmp_path: Path):
    """Under torchrun, or on four CPU devices: no error, and lines that show what was done."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAMS[name], encoding="utf-8")
    torch = "torch.distributed" in PROGRAMS[name]
    done = as_a_user(*TORCHRUN, script) if torch else as_a_user(script, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="4")
    assert done.returncode == 0, done.stdout + done.stderr
    for line in PRINTS[name]:
        assert re.search(line, done.stdout), done.stdout + done.stderr


@pytest.mark.slow
def test_what_was_there_before_runs_as_here():
    """Each "after" of docs/coming-from.md, against attention over the whole sequence."""
    printed = torchrun("coming_from_worker.py", 2)
    names = re.findall(r'^```python title="after: (.*?)"', PAGES["coming-from.md"], re.MULTILINE)
    assert len(names) > 7
    for name in names:
        assert printed.splitlines().count(f"{name}: as in one process") == 2, printed


def commands() -> list[str]:
    """The shell lines of the pages and of CONTRIBUTING.md: blocks of bash, indented lines, and the commands within sentences."""
    text = "\n".join([*PAGES.values(), (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")])
    blocks = re.findall(r"^ *```bash\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines += re.findall(r"^ {4}((?:make|python|torchrun|pip|\.ci/run)\b.*)$", text, re.MULTILINE)
    return sorted({*(line.split("  #")[0] for line in lines), *re.findall(r"`((?:python|make|pip) [^`]*)`", text)})


def test_commands_name_what_is_there():
    """Make's targets, and scripts of this repository. What they do is run by CI, or above."""
    known = [command for command in commands() if command.split()[0] in ("make", "python", "torchrun", "pip", ".ci/run")]
    assert len(known) > 30
    for command in known:
        program, *words = shlex.split(command, comments=True)
        if program == "make":
            targets = [word for word in words if "=" not in word and word not in ("TARGET",)]
            done = subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{command}: {done.stderr}"
        else:
            files = (
                [program, *words]
                if program == ".ci/run"
                else [word for word in words if re.match(r"(examples|tools|tests|docs)/", word)]
            )
            assert all((ROOT / word).exists() for word in files), command


# ---------------------------------------------------------------------------------------------------------------- examples

BARE = {
    "torch_minimal.py": "torchrun --standalone --nproc-per-node 2 examples/torch_minimal.py",
    "train_on_tpu.py --device cpu": "torchrun --standalone --nproc-per-node 2 examples/train_on_tpu.py --device cpu",
    "train_on_tpu.py": "pip install .*torch-tpu",
    "torch_xla_tpu.py": r"make xla, then .venv-xla/bin/python .*examples/torch_xla_tpu.py",
}


@pytest.mark.wide
@pytest.mark.parametrize("command", BARE)
def test_an_example_that_lacks_something_says_how_to_start_it(command: str):
    """In one line, and it does not pass for done."""
    if (command == "train_on_tpu.py" and find_spec("torch_tpu")) or (command == "torch_xla_tpu.py" and find_spec("torch_xla")):
        pytest.skip("what it would lack is here")
    name, *arguments = command.split()
    done = as_a_user(ROOT / "examples" / name, *arguments)
    assert done.returncode != 0
    assert re.fullmatch(f".*{BARE[command]}.*\n", done.stderr), done.stderr
