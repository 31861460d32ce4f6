"""`make test-image`: runs tests/deploy/test_image.py with a Docker engine, and a base image if BASE names none.

Figures go to build/image.json, and with `make test-image ARGS=--record` into benchmarks/results if all tests pass.
Ends with 77 and one line where neither is possible; make itself then ends with 2, after `Error 77`.
"""

import ast
import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from benchmarks.results import RESULTS, read_results, record
from tests.deploy.docker_engine import MissingPartError, docker_engine, run

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "engine"
SUITE = "bookworm"
BASE = "pdserve-test-base"
CANNOT_RUN = 77
FIGURES = ROOT / "build" / "image.json"
TITLE = "The image and the compose examples"


def main(arguments: list[str]) -> int:
    keep = "--record" in arguments
    arguments = [word for word in arguments if word != "--record"]
    try:
        with docker_engine(FOLDER) as environ, contextlib.ExitStack() as stack:
            FIGURES.parent.mkdir(exist_ok=True)
            FIGURES.unlink(missing_ok=True)
            base = os.environ.get("BASE") or stack.enter_context(base_image(environ))
            command = [sys.executable, "-m", "pytest", "-v", "--durations=0", "tests/deploy/test_image.py", *arguments]
            code = subprocess.call(command, cwd=ROOT, env={**environ, "BASE": base, "PDSERVE_IMAGE": "1"})
            if code == 0 and keep:
                record(RESULTS / "image.json", TITLE, read_results(FIGURES).rows)
            return code
    except MissingPartError as missing:
        print(f"test-image: not run: {missing}", flush=True)
        return CANNOT_RUN


@contextlib.contextmanager
def base_image(environ: dict[str, str]) -> Iterator[str]:
    """Debian with Python and pip, and with the certificates and the settings of pip of this machine."""
    tar = FOLDER / "base.tar"
    if not tar.exists():
        scripts = (
            'rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED',
            'ln -s python3 "$1"/usr/bin/python',
        )
        hooks = [f"--customize-hook={script}" for script in scripts]
        packages = "--include=ca-certificates,python3,python3-pip"
        partial = tar.with_suffix(".part.tar")
        run("mmdebstrap", "--variant=minbase", packages, *hooks, SUITE, partial, environ=environ)
        partial.rename(tar)
    imported = run("docker", "import", tar, f"{BASE}:{SUITE}", environ=environ).strip()
    gateway = run(
        "docker", "network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Gateway}}", environ=environ
    ).strip()
    context = FOLDER / "base"
    context.mkdir(exist_ok=True)
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")
    shutil.copy(certificates, context / certificates.name)
    with served_folders(gateway) as served:
        (context / "pip.conf").write_text(pip_conf(gateway, served), encoding="utf-8")
        (context / "Dockerfile").write_text(
            f"FROM {BASE}:{SUITE}\nCOPY {certificates.name} {certificates}\nCOPY pip.conf /etc/pip.conf\n"
            "ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore\n",
            encoding="utf-8",
        )
        run("docker", "build", "--quiet", "--tag", BASE, context, environ=environ)
        assert imported.startswith("sha256:")
        yield BASE


def pip_conf(gateway: str, served: "ServedFolders") -> str:
    """The settings of pip here, for a container: local folders become URLs of our own server."""
    values: dict[str, str] = {}
    for line in run(sys.executable, "-m", "pip", "config", "list").splitlines():
        name, _, value = line.partition("=")
        values[name.rpartition(".")[2]] = " ".join(map(served.url_of, str(ast.literal_eval(value)).split()))
    values["cert"] = "/etc/ssl/certs/ca-certificates.crt"
    values["trusted-host"] = f"{values.get('trusted-host', '')} {gateway}".strip()
    return "[global]\n" + "".join(f"{name} = {value}\n" for name, value in values.items())


class ServedFolders:
    """Folders of this machine at URLs that containers reach, and what lies beside them: an index links to it."""

    def __init__(self, address: str) -> None:
        self._served: set[Path] = set()
        served = self._served

        class Handler(SimpleHTTPRequestHandler):
            def translate_path(self, path: str) -> str:
                self.directory = "/"
                file = Path(super().translate_path(path))
                return str(file) if served & {*file.parents} else "/nowhere"

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer((address, 0), Handler)

    def url_of(self, word: str) -> str:
        path = word.removeprefix("file://")
        if path == word and not Path(word).is_dir():
            return word
        self._served.add(Path(path).parent)
        host, port = self.server.server_address[:2]
        return f"http://{host!s}:{port}{path}/"


@contextlib.contextmanager
def served_folders(address: str) -> Iterator[ServedFolders]:
    served = ServedFolders(address)
    threading.Thread(target=served.server.serve_forever, daemon=True).start()
    try:
        yield served
    finally:
        served.server.shutdown()
        served.server.server_close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
