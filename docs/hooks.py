"""Hooks of the documentation site: pages and links that lie outside of docs/.

ARCHITECTURE.md, CONTRIBUTING.md and CHANGELOG.md become pages of the site. A link to any other file of the repository
becomes a link to `repo_url`, or the path of the file if no `repo_url` is set. A link to a file that does not exist
is reported as a warning, which fails a strict build.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"ARCHITECTURE.md": "architecture.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\[]*)\]\((?P<path>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")
log = logging.getLogger("mkdocs.hooks.windfall")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie in the root of the repository."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite links that leave docs/."""
    sources = {page_name: source for source, page_name in PAGES.items()}
    source = sources.get(page.file.src_uri) or f"docs/{page.file.src_uri}"

    def rewrite(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), found["path"]))
        anchor = found["anchor"] or ""
        if path in PAGES:
            return f"[{found['text']}]({PAGES[path]}{anchor})"
        if path.startswith("docs/"):
            return f"[{found['text']}]({path.removeprefix('docs/')}{anchor})"
        if not (ROOT / path).exists():
            log.warning("%s links to '%s', which does not exist", source, found["path"])
        if config.repo_url:
            return f"[{found['text']}]({config.repo_url.rstrip('/')}/blob/main/{path}{anchor})"
        if path in found["text"]:
            return found["text"]
        return f"`{path}`" if posixpath.basename(path) == found["text"] else f"{found['text']} (`{path}`)"

    return LINK.sub(rewrite, markdown)
