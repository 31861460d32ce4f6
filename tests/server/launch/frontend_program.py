"""The frontend with a scripted leader, as a program. Arguments: settings (JSON), program of the leader, behaviour."""

import json
import sys
from collections.abc import Sequence

from pdserve.configs.load import parse_config
from pdserve.server.cli import exit_code_of
from pdserve.server.launch.frontend import run_frontend


def main(arguments: Sequence[str]) -> int:
    settings, *leader = arguments
    config = parse_config(json.loads(settings))
    return exit_code_of(lambda: run_frontend(config, leader_command=[sys.executable, *leader]))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    assert "torch" not in sys.modules, "the frontend imported torch"
    sys.exit(code)
