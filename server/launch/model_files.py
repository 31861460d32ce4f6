"""Downloads a model that is named by its Hugging Face repository, before anything else reads its files."""

import logging
from typing import TypeVar

from ...configs.schema import AnyServerConfig, DecodeConfig, PrefillConfig
from ...models.loading.hub import find_on_hub
from .startup_checks import check_startup

log = logging.getLogger("pdserve.frontend")

ConfigT = TypeVar("ConfigT", PrefillConfig, DecodeConfig, AnyServerConfig)


def with_local_model(config: ConfigT) -> ConfigT:
    """Returns the configuration with `org/name` replaced by a path in the local Hugging Face cache. Downloads missing
    files; weights only after all checks that do not need them. Raises StartupError.
    """
    found = find_on_hub(config.model, config.revision)
    if found is None:
        return config
    source = found.source()
    if source is not None:
        check_startup(config, source)
    path = found.download(config.load_format)
    log.info("model %s: revision %s, in %s", found.repo, found.commit, path)
    update: dict[str, object] = {"model": str(path), "revision": None}
    if config.served_model_name is None and found.gguf is None:
        update["served_model_name"] = found.repo  # the directory is named after the commit
    return config.model_copy(update=update)
