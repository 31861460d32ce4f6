"""For setting names of vLLM and SGLang, errors suggest only settings that exist, and each name has one meaning."""

import argparse
import re

from pdserve.configs.flags import ALIASES
from pdserve.configs.other_names import BENCH_FLAGS, EXPLANATIONS, OUR_NAMES
from pdserve.configs.schema import DecodeConfig, PrefillConfig
from pdserve.server.bench.options import add_bench_flags

SETTINGS = PrefillConfig.model_fields.keys() | DecodeConfig.model_fields.keys()
ACCEPTED = SETTINGS | {alias.removeprefix("--").replace("-", "_") for names in ALIASES.values() for alias in names}


def test_suggested_settings_exist() -> None:
    assert {name.removeprefix("no_") for name in OUR_NAMES.values()} <= SETTINGS
    suggested = {word for text in EXPLANATIONS.values() for word in re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", text)}
    assert suggested - {"chat_template"} <= SETTINGS


def test_suggested_flags_of_bench_exist() -> None:
    parser = argparse.ArgumentParser()
    add_bench_flags(parser)
    assert {f"--{name.replace('_', '-')}" for name in BENCH_FLAGS.values()} <= parser._option_string_actions.keys()


def test_accepted_names_are_not_explained_as_names_of_others() -> None:
    assert not (OUR_NAMES.keys() | EXPLANATIONS.keys()) & ACCEPTED
    assert not OUR_NAMES.keys() & EXPLANATIONS.keys()
