"""Stream a chat answer from a decode server: python examples/stream.py "What is the capital of France?"

Set PDSERVE_URL if the server is not http://127.0.0.1:8200, and PDSERVE_API_KEY if it requires a key.
"""

import json
import os
import sys

import httpx


def main() -> int:
    url = os.environ.get("PDSERVE_URL", "http://127.0.0.1:8200")
    key = os.environ.get("PDSERVE_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {
        "messages": [{"role": "user", "content": " ".join(sys.argv[1:]) or "What is the capital of France?"}],
        "max_tokens": 128,
        "temperature": 0,
        "stream": True,
    }
    # No read timeout: the server bounds every request itself and always ends the stream.
    timeout = httpx.Timeout(10, read=None)
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=timeout) as response:
        if response.is_error:
            print(response.read().decode(), file=sys.stderr)
            return 1
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                print(f"\n{event['error']['message']}", file=sys.stderr)
                return 1
            for choice in event["choices"]:
                print(choice["delta"].get("content") or "", end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except httpx.ConnectError as error:
        sys.exit(f"cannot reach the server: {error}; 'pdserve up' starts one")
