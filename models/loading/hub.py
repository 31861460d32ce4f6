"""Models of the Hugging Face Hub: `org/name` and `org/name:file.gguf` as files in the local cache. No torch.

`huggingface_hub` downloads and caches. Its environment variables apply: HF_HOME, HF_HUB_OFFLINE, HF_TOKEN, HF_ENDPOINT.
Only files that a server reads are downloaded, small ones first, so that a model that cannot be served is refused before
its weights are downloaded.
"""

import contextlib
import glob
import logging
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import httpx

from ...common.errors import StartupError
from ...common.progress import INTERVAL_S
from ...configs.setting_types import LoadFormat
from ..formats.hub_client import checked_client
from ..formats.json_fields import bare
from ..registry import check_gguf, read_config_file
from .catalog import CHAT_TEMPLATE_FILES, EMBEDDED_MODEL, WEIGHT_FILE, WEIGHT_INDEX, ModelSource, indexed_tensors

log = logging.getLogger("pdserve.models")

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<file>.+))?")
_REQUIRED = ("config.json", "tokenizer.json")
_SMALL_FILES = (
    *_REQUIRED,
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    *CHAT_TEMPLATE_FILES.values(),
    WEIGHT_INDEX,
)
_SPLIT_GGUF = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_LISTED = 20
GB = 1e9


@dataclass(frozen=True)
class HubModel:
    """A repository at one commit, and which of its files to serve. `files` maps names to sizes, if they are known."""

    repo: str
    commit: str
    files: Mapping[str, int | None]
    gguf: str | None = None
    """The GGUF file to serve; None for safetensors."""
    gguf_architecture: str | None = None
    offline: bool = False

    def source(self) -> ModelSource | None:
        """The configuration, from config.json, which is downloaded; None for a GGUF file without one. Raises
        StartupError for a model that is not supported.
        """
        if self.gguf is not None:
            if self.gguf_architecture is not None:
                check_gguf(f"model {self.repo}", self.gguf_architecture)
            return None
        for name in _REQUIRED:
            if name not in self.files:
                raise StartupError(f"model {self.repo}: its repository has no {name}{self._gguf_hint()}")
        directory = self._fetch([name for name in _SMALL_FILES if name in self.files])
        return ModelSource(self.repo, directory, "huggingface", read_config_file(directory / "config.json"))

    def download(self, load_format: LoadFormat = "auto") -> Path:
        """Download what is missing, weights only if `load_format` reads them. Returns the directory, or the GGUF file.
        Raises StartupError.
        """
        source = self.source()
        if source is None:
            assert self.gguf is not None
            return self._fetch([self.gguf]) / self.gguf
        if load_format == "auto":
            self._fetch(self._weight_files(source.path))
        return source.path

    def _weight_files(self, directory: Path) -> list[str]:
        """As `safetensors_files`: a repository may have the same weights in several formats."""
        if WEIGHT_FILE in self.files:
            return [WEIGHT_FILE]
        if WEIGHT_INDEX not in self.files:
            names = [name for name in self.files if name.endswith(".safetensors") and "/" not in name]
            if not names:
                raise StartupError(
                    f"model {self.repo}: its repository has no *.safetensors file; other weight formats are not "
                    f"supported{self._gguf_hint()}"
                )
            return sorted(names)
        return sorted(set(indexed_tensors(directory / WEIGHT_INDEX, f"model {self.repo}").values()))

    def _gguf_hint(self) -> str:
        files = _gguf_files(self.files)
        return f"; for a GGUF file give --model {self.repo}:FILE, one of {_listed(files)}" if files else ""

    def _fetch(self, names: list[str]) -> Path:
        """Download files that are not in the cache. Returns the directory of this commit."""
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.file_download import repo_folder_name

        folder = Path(constants.HF_HUB_CACHE).expanduser() / repo_folder_name(repo_id=self.repo, repo_type="model")
        directory = folder / "snapshots" / self.commit
        missing = [name for name in names if not (directory / name).is_file()]
        if not missing:
            return directory
        if self.offline:
            raise StartupError(
                f"model {self.repo}: {missing[0]} is not in the cache {directory}, and cannot be fetched"
            )
        total = sum(self.files.get(name) or 0 for name in missing)
        if total >= GB:
            log.info("model %s: downloading %.1f GB to %s", self.repo, total / GB, folder)
        checked_client().begin(folder)
        try:
            with _explained(self.repo, self.commit), _progress(self.repo, folder / "blobs", total):
                bars = None if sys.stderr.isatty() else _no_bars()
                snapshot_download(
                    self.repo,
                    revision=self.commit,
                    allow_patterns=[glob.escape(name) for name in missing],
                    tqdm_class=bars,
                )
        except (httpx.TransportError, HfHubHTTPError) as error:
            reason = _first_line(error)
            raise StartupError(f"model {self.repo}: {constants.ENDPOINT} cannot be reached ({reason})") from None
        return directory


def may_be_on_hub(spec: str) -> bool:
    """Whether `spec` has the form of a name on the Hub and does not exist on this machine."""
    named = _NAME.fullmatch(spec)
    local = spec == EMBEDDED_MODEL or Path(spec).expanduser().exists()
    return named is not None and not local and not named["repo"].endswith((".gguf", ".json"))


def find_on_hub(spec: str, revision: str | None) -> HubModel | None:
    """Look up `org/name` or `org/name:file.gguf` on the Hub, or in the cache if the Hub cannot be reached. None if
    `spec` exists on this machine, or cannot be a name on the Hub. Raises StartupError.
    """
    named = _NAME.fullmatch(spec)
    if named is None or not may_be_on_hub(spec):
        if revision is not None:
            raise StartupError(
                f"revision = {revision!r} is for models of the Hugging Face Hub (org/name), and --model is {spec!r}"
            )
        return None
    found = _look_up(named["repo"], revision)
    return _choose_gguf(found, named["file"])


def _look_up(repo: str, revision: str | None) -> HubModel:
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    checked_client().begin(Path(constants.HF_HUB_CACHE).expanduser())
    try:
        with _explained(repo, revision):
            info = HfApi().model_info(repo, revision=revision, files_metadata=True)
            # fetches nothing, but remembers the commit of this revision for a later start without the Hub
            directory = snapshot_download(repo, revision=revision, allow_patterns=[], tqdm_class=_no_bars())
    except (OfflineModeIsEnabled, httpx.TransportError, HfHubHTTPError) as error:
        return _cached(repo, revision, error)
    except (ImportError, ValueError) as error:  # httpx cannot use the proxy of the environment: SOCKS needs a package
        return _cached(repo, revision, error)
    files = {sibling.rfilename: sibling.size for sibling in info.siblings or ()}
    architecture = (info.gguf or {}).get("architecture")
    return HubModel(repo, Path(directory).name, files, gguf_architecture=architecture)


def _cached(repo: str, revision: str | None, error: Exception) -> HubModel:
    """The model as an earlier run has left it in the cache."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    reason = f"{constants.ENDPOINT} cannot be reached ({_first_line(error)})"
    if isinstance(error, OfflineModeIsEnabled):
        reason = "HF_HUB_OFFLINE is set"
    try:
        directory = Path(snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=[]))
    except LocalEntryNotFoundError:
        at = "" if revision is None else f" at revision {revision!r}"
        raise StartupError(
            f"model {repo!r}: no such directory here, {reason}, and it is not in the cache {constants.HF_HUB_CACHE}{at}"
        ) from None
    log.warning("model %s: %s; using the files in %s", repo, reason, directory)
    files = {path.relative_to(directory).as_posix(): None for path in directory.rglob("*") if path.is_file()}
    return HubModel(repo, directory.name, files, offline=True)


def _choose_gguf(model: HubModel, wanted: str | None) -> HubModel:
    """With `wanted`, the file of that name, or the only one with this text in its name (`Q4_K_M`). Without, the only
    GGUF file of a repository that has no safetensors.
    """
    files = _gguf_files(model.files)
    if wanted is None:
        if not files or any(name.endswith(".safetensors") for name in model.files):
            return model
        matching = files
    else:
        matching = [wanted] if wanted in files else [name for name in files if wanted.lower() in name.lower()]
    if not matching:
        raise StartupError(f"model {model.repo}: no GGUF file {wanted!r} in its repository; it has {_listed(files)}")
    if all(_SPLIT_GGUF.search(name) for name in matching):
        raise StartupError(
            f"model {model.repo}: {matching[0]} is one of several GGUF files of a split model, which is not supported; "
            "download and merge them (llama-gguf-split --merge) and give --model the merged file"
        )
    if len(matching) > 1:
        raise StartupError(
            f"model {model.repo}: {len(matching)} GGUF files match; give --model {model.repo}:FILE, one of "
            f"{_listed(matching)}"
        )
    (name,) = matching
    return replace(model, gguf=name)


def _gguf_files(files: Mapping[str, int | None]) -> list[str]:
    return sorted(name for name in files if PurePosixPath(name).suffix == ".gguf")


def _listed(names: list[str]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


@contextlib.contextmanager
def _explained(repo: str, revision: str | None) -> Iterator[None]:
    """Turns errors of the Hub into StartupErrors. Connection errors pass through: the cache may have the model."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except GatedRepoError:
        raise StartupError(
            f"model {repo!r}: access is restricted; accept its conditions at {constants.ENDPOINT}/{repo} and set "
            "HF_TOKEN to a token of that account"
        ) from None
    except RepositoryNotFoundError:
        raise StartupError(
            f"model {repo!r}: no such directory here, and no such repository at {constants.ENDPOINT}; for a private "
            "one, set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise StartupError(f"model {repo!r}: its repository has no revision {revision!r}") from None
    except HFValidationError as error:
        raise StartupError(f"model {repo!r}: {error}") from None
    except HfHubHTTPError as error:
        if error.response.is_server_error:
            raise
        raise StartupError(f"model {repo!r}: {constants.ENDPOINT}: {_first_line(error)}") from None
    except (OfflineModeIsEnabled, httpx.TransportError):
        raise
    except LocalEntryNotFoundError as error:
        reason = str(error.__cause__ or error)
        raise StartupError(f"model {repo!r}: cannot be downloaded: {bare(' '.join(reason.split()))}") from None
    except OSError as error:
        reason = bare(" ".join(str(error).split()))
        raise StartupError(f"model {repo!r}: cannot be downloaded to {constants.HF_HUB_CACHE}: {reason}") from error
    except httpx.TooManyRedirects as error:
        raise StartupError(f"model {repo!r}: {constants.ENDPOINT}: {_first_line(error)}") from None
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError) as error:
        raise StartupError(
            f"model {repo!r}: {constants.ENDPOINT} does not answer as a Hub does: {type(error).__name__}: "
            f"{_first_line(error)}"
        ) from error


@contextlib.contextmanager
def _progress(repo: str, blobs: Path, total: int) -> Iterator[None]:
    """Log the progress of a download every few seconds. On a terminal, huggingface_hub shows bars instead."""
    if sys.stderr.isatty():
        yield
        return
    before, ended = _size_of(blobs), threading.Event()

    def watch() -> None:
        while not ended.wait(INTERVAL_S):
            log.info("model %s: downloaded %.1f of %.1f GB", repo, (_size_of(blobs) - before) / GB, total / GB)

    watcher = threading.Thread(target=watch, name="download-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _first_line(error: Exception) -> str:
    return bare((str(error).strip() or type(error).__name__).splitlines()[0])


# Any: tqdm has no types.
def _no_bars() -> Any:
    """Progress bars that are not shown: huggingface_hub shows some of its own also where there is no terminal."""
    from huggingface_hub import utils

    class NoBar(utils.tqdm):  # type: ignore[misc, name-defined]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **{**named, "disable": True})

    return NoBar


def _size_of(folder: Path) -> int:
    """The size of all files in a folder; files may be renamed during the call."""
    size = 0
    for path in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size
    return size
