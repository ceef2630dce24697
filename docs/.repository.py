"""Link each page to its source once the repository's address is known."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Without `repo_url` an edit link would lead into the site itself."""
    if config.repo_url:
        config.edit_uri = "edit/main/docs/"
    return config
