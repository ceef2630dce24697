"""Link each page to its source once the repository's address is known, and include sections of the README."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig

README = Path(__file__).parents[1] / "README.md"
_PLACE = re.compile(r"<!-- README: (.+?) -->\n.*?<!-- end -->\n", re.DOTALL)
"""Match a link to a section of the README; group 1 is its heading. The site shows the section in the link's place."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Without `repo_url` an edit link would lead into the site itself."""
    if config.repo_url:
        config.edit_uri = "edit/main/docs/"
    return config


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace links to sections of the README, which is no page of the site, with the sections themselves."""
    return _PLACE.sub(lambda place: _section(place[1]), markdown)


def _section(heading: str) -> str:
    """Return the README's text below a heading; links are relative to ``docs``."""
    below = README.read_text("utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    if not below:
        raise ValueError(f"README.md has no section {heading!r}")
    return below.strip().replace("](docs/", "](") + "\n"
