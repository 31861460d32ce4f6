"""Serves `/`, a live page of this server. Its files are in server/api/page/; they need no build step and load nothing
from other hosts.

The page itself needs no API key. It shows data of /server_info, which needs the key.
"""

from functools import cache
from pathlib import Path

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import Response

FOLDER = Path(__file__).parent / "page"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Adds the page and its files, without authentication. They are not part of /openapi.json."""
    contents = cache(_read_files)

    @app.api_route("/", methods=["GET", "HEAD"])
    async def page() -> Response:
        return _response("index.html", contents())

    @app.api_route("/page/{name}", methods=["GET", "HEAD"])
    async def page_file(name: str) -> Response:
        return _response(name, contents())


def _read_files() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in MEDIA_TYPES}


def _response(name: str, contents: dict[str, bytes]) -> Response:
    if name not in contents:
        raise HTTPException(404)
    return Response(contents[name], headers=HEADERS, media_type=MEDIA_TYPES[Path(name).suffix])
