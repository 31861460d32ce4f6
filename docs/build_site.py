"""Build the documentation as a site: copy the pages and what they link to, keep the tree, run MkDocs.

    python docs/build_site.py [--strict]

Links are checked: with --strict, one that leads nowhere fails the build.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "build" / "site-source"
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "docs/*.md",
    "benchmarks/*.md",
    "kernels/README.md",
    "deploy/**/*.md",
)


def copy_pages() -> None:
    """Copy pages, and files that they link to. A link to a folder leads to its README.md, or to a list of its files."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    for page in (page for pattern in PAGES for page in sorted(ROOT.glob(pattern))):
        target = SOURCE / page.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_with_copied_links(page), encoding="utf-8")


def _with_copied_links(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    return re.sub(r"\]\((?!https?:|#)([^)#]+)", lambda link: f"]({_copied(page, link[1])}", text)


def _copied(page: Path, link: str) -> str:
    """The link in the site. Its target is copied, unless it is a page."""
    linked = (page.parent / link).resolve()
    if not linked.is_relative_to(ROOT) or not linked.exists() or linked.suffix == ".md":
        return link
    target = SOURCE / linked.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    if linked.suffix == ".svg":
        shutil.copy(linked, target)
        return link
    if linked.is_file():
        target.with_name(f"{target.name}.txt").write_bytes(linked.read_bytes())  # shown by browsers, not downloaded
        return f"{link}.txt"
    if not (linked / "README.md").exists():
        target.mkdir(exist_ok=True)
        files = sorted(path.name for path in linked.iterdir() if path.is_file())
        listing = "\n".join([f"# {linked.name}", "", *(f"- `{linked.relative_to(ROOT)}/{name}`" for name in files), ""])
        (target / "README.md").write_text(listing, encoding="utf-8")
    return f"{link.rstrip('/')}/README.md"


def main() -> int:
    copy_pages()
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", str(ROOT / "mkdocs.yml")]
    return subprocess.call([*command, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
