"""A frontend whose event loop is blocked for ever by GET /get_load, while other threads run."""

import sys
import threading

from pdserve.server.api.app import Routes
from tests.server.launch import frontend_program


async def block(*_: object) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


if __name__ == "__main__":
    Routes.load = block  # type: ignore[assignment, method-assign]
    sys.exit(frontend_program.main(sys.argv[1:]))
