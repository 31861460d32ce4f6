"""The documentation builds as a site."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_site_builds_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    """MkDocs warns about links and anchors without a target and about pages outside the navigation; --strict fails."""
    command = [sys.executable, "docs/build_site.py", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "index.html").exists()
    assert "deploy/docker-compose.gpu.yml.txt" in (tmp_path / "docs" / "troubleshooting.html").read_text(
        encoding="utf-8"
    )


def test_broken_links_fail_the_build(tmp_path: Path) -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:\n  - Start")[0]
    (tmp_path / "mkdocs.yml").write_text(settings.replace("build/site-source", "pages"), encoding="utf-8")
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "index.md").write_text(
        "# A page\n\n[page](nowhere.md) [anchor](#nothing)\n", encoding="utf-8"
    )
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "contains a link 'nowhere.md'" in done.stderr
    assert "contains a link '#nothing'" in done.stderr
