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
