"""docs/support.md has what kernels and strategies declare: its tables are what tools/support_matrix.py writes."""

from pathlib import Path

from tools import support_matrix

PAGE = (Path(__file__).parents[1] / "docs" / "support.md").read_text(encoding="utf-8")


def test_the_tables_are_what_is_declared():
    assert support_matrix.written(PAGE) == PAGE, "python -m tools.support_matrix writes the tables anew"


def test_every_kernel_and_strategy_has_a_column():
    """Those with the same answers share one."""
    for table, names in (("kernels", support_matrix.KERNELS), ("strategies", support_matrix.STRATEGIES)):
        head = support_matrix.tables()[table].splitlines()[0]
        assert all(head.count(f"`{name}`") == 1 for name in names), head


def test_every_feature_has_its_line_in_each_table():
    """Features with the same answers share one."""
    lines = [line.split(" | ")[0].removeprefix("| ") for table in support_matrix.tables().values() for line in table.splitlines()]
    named = [name for line in lines for name in line.split("; ")]
    for feature in support_matrix.FEATURES:
        assert named.count(feature) == 2, feature
