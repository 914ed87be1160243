"""What mkdocs does not do by itself: README.md is the first page, links out of docs/ become words, and llms.txt lists the pages."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES: dict[str, tuple[str, str]] = {}  # of this build: a page's path, its title and its text as it was written


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri == "index.md":
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        markdown = re.sub(r'(\]\(|src="|srcset=")docs/', r"\1", readme)
        markdown = re.sub(r"<picture>.*?</picture>", _picture, markdown, flags=re.DOTALL)
    title = re.search(r"^# (.+)$", markdown, re.MULTILINE)
    PAGES[page.file.src_uri] = (title[1] if title else page.file.src_uri, markdown)
    return re.sub(r"\[([^\]]+)\]\((?:\.\./)*(?:DESIGN|CONTRIBUTING|SECURITY|benchmarks/|tests/)[^)]*\)", r"\1", markdown)


def _picture(match: re.Match[str]) -> str:
    """For the site's own switch between light and dark, which a browser's preference does not follow."""
    alt, light, dark = (re.search(name + '="(.*?)"', match[0])[1] for name in ("alt", "src", "srcset"))  # type: ignore[index]
    return f"![{alt}]({light}#only-light)\n![{alt}]({dark}#only-dark)"


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name functions as Sphinx does, and end the line before a block of code with two colons."""
    html = re.sub(r":(?:func|class|meth|mod|attr):(?=<code)", "", html)
    return html.replace("::</p>", ":</p>")


def on_post_build(config: Any, **_: Any) -> None:
    """https://llmstxt.org: the pages by name, and all their text in one file."""
    site = Path(config["site_dir"])
    names = [f"- [{title}]({path.removesuffix('.md')}/)" for path, (title, _) in PAGES.items()]
    head = f"# {config['site_name']}\n\n> {config['site_description']}\n\n"
    (site / "llms.txt").write_text(f"{head}## Pages\n\n" + "\n".join(names) + "\n", encoding="utf-8")
    (site / "llms-full.txt").write_text(head + "\n\n".join(text for _, text in PAGES.values()), encoding="utf-8")
