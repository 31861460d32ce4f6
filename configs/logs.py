"""One log format for all processes of a server: time, level letter, role, message, on stderr."""

import logging

CHATTY = ("uvicorn", "uvicorn.error", "asyncio")


class LineFormatter(logging.Formatter):
    """`2026-11-15 02:14:54.123 I decode: message`."""

    default_msec_format = "%s.%03d"

    def __init__(self, role: str) -> None:
        super().__init__(f"%(asctime)s %(levelletter)s {role}: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        record.levelletter = record.levelname[0]
        return super().format(record)


def configure_logging(level: str, role: str) -> None:
    """Send the log of this process to stderr. Call once, first thing."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(role))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
