"""docs/support.md has what kernels and strategies declare: its tables are what tools/support_matrix.py writes."""

from pathlib import Path

from tools import support_matrix

PAGE = (Path(__file__).parents[1] / "docs" / "support.md").read_text(encoding="utf-8")


def test_the_tables_are_what_is_declared():
    assert support_matrix.written(PAGE) == PAGE, "python -m tools.support_matrix writes the tables anew"


def test_every_kernel_and_strategy_has_a_column():
    for name in (*support_matrix.KERNELS, *support_matrix.STRATEGIES):
        assert f"| `{name}` |" in PAGE, name
