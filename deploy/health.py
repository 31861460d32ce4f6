"""The health check of the image: exits with 0 if the server at HEALTH_PORT is healthy, else with 1 and one line why."""

import http.client
import os
import sys

TIMEOUT_S = 2.0


def main() -> str | None:
    """Why the server is not healthy; None if it is."""
    port = os.environ.get("HEALTH_PORT", "8200")
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        body = answer.read(1000).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return f"port {port}: {error or type(error).__name__}"
    return None if answer.status == 200 else f"port {port}: {answer.status} {body}"


if __name__ == "__main__":
    sys.exit(main())
