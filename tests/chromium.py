"""Drives a headless Chromium over its debugging pipe, for tests of the live page."""

import asyncio
import base64
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal


class Browser:
    """One page. Commands are those of the Chrome DevTools Protocol; console errors are collected in `errors`."""

    def __init__(self, write: int, reader: asyncio.StreamReader) -> None:
        self._write = write
        self._reader = reader
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []

    async def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            reply = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            if reply.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(reply["params"]))
            if reply.get("method") == "Log.entryAdded" and reply["params"]["entry"]["level"] == "error":
                self.errors.append(reply["params"]["entry"]["text"])
            if reply.get("id") == self._number:
                assert "error" not in reply, reply
                result: dict[str, Any] = reply["result"]
                return result

    async def open(self, url: str, *, width: int = 1100, height: int = 1000) -> None:
        if self._session is None:
            target = await self.command("Target.createTarget", url="about:blank")
            attached = await self.command("Target.attachToTarget", targetId=target["targetId"], flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Runtime", "Log", "Page"):
                await self.command(f"{domain}.enable")
        await self.resize(width, height)
        await self.command("Page.navigate", url=url)
        await self.wait_for("location.href !== 'about:blank' && document.readyState === 'complete'")

    async def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.command("Emulation.setDeviceMetricsOverride", **size)

    async def colours(self, scheme: Literal["light", "dark"]) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.command("Emulation.setEmulatedMedia", features=features)

    async def evaluate(self, script: str) -> Any:
        found = await self.command("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def wait_for(self, script: str, within_s: float = 30.0) -> None:
        """Until the expression is true."""
        async with asyncio.timeout(within_s):
            while not await self.evaluate(script):
                await asyncio.sleep(0.05)

    async def screenshot(self, file: Path) -> None:
        taken = await self.command("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(taken["data"]))


@asynccontextmanager
async def chromium(program: str, profile: Path) -> AsyncIterator[Browser]:
    to_browser, write = os.pipe()
    read, from_browser = os.pipe()
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-proxy-server", "--hide-scrollbars")
    # the browser reads commands from descriptor 3 and writes replies to 4
    shell = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
    arguments = [*flags, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", shell, program, *arguments, pass_fds=(to_browser, from_browser), stderr=asyncio.subprocess.DEVNULL
    )
    os.close(to_browser)
    os.close(from_browser)
    reader = asyncio.StreamReader(limit=1 << 26)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb"))
    try:
        yield Browser(write, reader)
    finally:
        process.terminate()
        await process.wait()
        transport.close()
        os.close(write)
