"""The wheel and the sdist of `make dist`, installed and imported outside of this checkout."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("server", "scheduler", "models", "memory", "transfer", "kernels", "configs", "common")
SITE_PACKAGES = Path("lib", f"python{sysconfig.get_python_version()}", "site-packages")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def run(*command: str | Path, cwd: Path) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one wheel and one sdist of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    run("make", "dist", f"DIST={folder}", cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def installed_python(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with the wheel. A .pth file adds the packages of the current one."""
    environment = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment)
    # The packages of this environment without its editable install, whose .pth file would add this checkout.
    (environment / SITE_PACKAGES / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    python = environment / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    run(
        sys.executable, "-m", "pip", "--quiet", "--python", python,
        "install", "--no-compile", "--no-deps", "--no-index", "--ignore-installed", wheel,
        cwd=environment,
    )  # fmt: skip
    return python


def test_wheel_is_one_package_of_all_folders(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    ours = {
        f"pdserve/{path.relative_to(ROOT)}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".yaml", ".cu", ".cuh", ".html", ".css", ".js"}
    } | {"pdserve/py.typed"}
    assert ours - names == set()
    others = {name for name in names if not name.startswith(("pdserve/", f"pdserve-{PROJECT['version']}.dist-info/"))}
    assert others == set()
    assert f"pdserve-{PROJECT['version']}.dist-info/licenses/LICENSE" in names
    assert not any(name.startswith(("pdserve/tests", "pdserve/.dev")) or name.endswith(".pyc") for name in names)


def test_sdist_holds_the_sources_and_installs_the_files_of_the_wheel(built: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    for name in ("README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "tests/test_packaging.py"):
        assert f"pdserve-{PROJECT['version']}/{name}" in names
    run(
        sys.executable, "-m", "pip", "--quiet",
        "wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", tmp_path, sdist,
        cwd=tmp_path,
    )  # fmt: skip
    (first,) = built.glob("*.whl")
    (second,) = tmp_path.glob("*.whl")
    assert second.read_bytes() == first.read_bytes(), "both can be built again, byte for byte"


def test_metadata_says_who_made_it_where_it_lives_and_what_it_runs_on(built: Path) -> None:
    """The build refuses classifiers that PyPI does not know."""
    (wheel,) = built.glob("*.whl")
    text = zipfile.ZipFile(wheel).read(f"pdserve-{PROJECT['version']}.dist-info/METADATA").decode()
    metadata = Parser().parsestr(text)
    assert (metadata["License-Expression"], metadata["Author"]) == ("Apache-2.0", "The pdserve authors")
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL", []))
    assert urls.keys() == {"Repository", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith(urls["Repository"]) for url in urls.values())
    pythons = re.findall(r"^Classifier: Programming Language :: Python :: (3\.\d+)$", text, re.MULTILINE)
    lowest, bound = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()  # type: ignore[union-attr]
    assert pythons == [f"3.{minor}" for minor in range(int(lowest), int(bound))]


def test_installed_wheel_imports_and_runs(installed_python: Path, tmp_path: Path) -> None:
    script = "import pdserve.server.cli as cli; print(cli.__file__); print(cli.version_line())"
    where, version = run(installed_python, "-I", "-c", script, cwd=tmp_path).splitlines()
    assert Path(where).is_relative_to(installed_python.parents[1])
    assert version.startswith(f"pdserve {PROJECT['version']}, ")
    assert run(installed_python, "-I", "-m", "pdserve.server", "version", cwd=tmp_path).strip() == version
    assert run(installed_python.with_name("pdserve"), "version", cwd=tmp_path).strip() == version
    script = "from pdserve.configs.load import find_config_file; print(find_config_file('local'))"
    preset = run(installed_python, "-I", "-c", script, cwd=tmp_path).strip()
    assert Path(preset).is_relative_to(installed_python.parents[1])


def test_uninstall_leaves_no_files(installed_python: Path, tmp_path: Path) -> None:
    """No byte code and no compiled kernels: those are in the cache folder of the user."""
    environment, home = tmp_path / "venv", tmp_path / "home"
    shutil.copytree(installed_python.parents[1], environment, symlinks=True)
    python, site_packages = environment / "bin" / "python", environment / SITE_PACKAGES
    (site_packages / "pdserve").resolve(strict=True)
    (environment / "bin" / "pdserve").resolve(strict=True)
    compile_one = (
        "import os, sys; os.environ.update(HOME=sys.argv[1], XDG_CACHE_HOME='');"
        "import pdserve.kernels.numba.swiglu;"
        "from pdserve.kernels.numba.openmp import compile_kernels; compile_kernels()"
    )
    run(python, "-I", "-c", compile_one, str(home), cwd=tmp_path)
    run(python, "-I", "-m", "pdserve.server", "version", cwd=tmp_path)
    assert list(home.rglob("*.nbc")), "the kernel was compiled, and kept"
    assert list((site_packages / "pdserve").rglob("*.pyc")), "byte code was written"
    run(sys.executable, "-m", "pip", "--quiet", "--python", python, "uninstall", "--yes", "pdserve", cwd=tmp_path)
    assert [path.name for path in site_packages.iterdir()] == ["outer.pth"]
    assert [path.name for path in (environment / "bin").iterdir() if "pdserve" in path.name] == []


def test_top_level_folders_are_not_importable_by_bare_name(installed_python: Path, tmp_path: Path) -> None:
    script = (
        "import importlib.util, sys\n"
        "for name in sys.argv[1:]:\n"
        "    spec = importlib.util.find_spec(name)\n"
        "    print(name, list(spec.submodule_search_locations or [spec.origin]) if spec else None)"
    )
    environment = str(installed_python.parents[1])
    for line in run(installed_python, "-I", "-c", script, *FOLDERS, cwd=tmp_path).splitlines():
        assert environment not in line
        assert str(ROOT / line.split()[0]) not in line


def test_pdserve_command_is_declared() -> None:
    assert PROJECT["scripts"] == {"pdserve": "pdserve.server.__main__:main"}
