"""docs/long-context.md has the plans that the library makes today, and its picture is theirs."""

import xml.etree.ElementTree as ET

from benchmarks.training import long
from ring_attn.memory import plan


def test_the_page_has_the_tables():
    page = long.PAGE.read_text(encoding="utf-8")
    assert long.written(page) == page, "python -m benchmarks.training.long --write writes them anew"
    assert page.count("| - |") + page.count("GiB") > 8


def test_the_picture_is_that_of_the_plan():
    found = plan("Qwen3-8B", 2**20, 8, 80)
    drawn = long.picture(found)
    assert long.PICTURE.read_text(encoding="utf-8") == drawn
    texts = [x.text for x in ET.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert set(texts) >= {row.name for row in found.rows}
