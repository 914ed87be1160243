"""What a tool has written into a page: it stands between two comments, the first of which names it and the tool."""

from collections.abc import Mapping


def written(page: str, parts: Mapping[str, str], tool: str) -> str:
    """The page with each of the parts, by its name, between ``<!-- NAME: written by TOOL -->`` and ``<!-- end -->``."""
    for name, part in parts.items():
        begin = f"<!-- {name}: written by {tool} -->\n"
        assert page.count(begin) == 1, f"the page must have {begin.strip()} once, got {page.count(begin)}"
        before, after = page.split(begin)
        page = f"{before}{begin}\n{part}\n\n<!-- end -->{after.split('<!-- end -->', 1)[1]}"
    return page
