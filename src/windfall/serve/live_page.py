"""GET /: the live page, which is a few static files."""

from __future__ import annotations

from http import HTTPStatus
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import Response
from starlette.exceptions import HTTPException

INDEX = "index.html"
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
FOLDER = files("windfall.serve").joinpath("page")
FILES = {each.name: each.read_bytes() for each in FOLDER.iterdir() if each.name.rpartition(".")[2] in KINDS}
PAGE_PATHS = ("/", *(f"/page/{name}" for name in sorted(FILES)))
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> APIRouter:
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    async def index() -> Response:
        return _file(INDEX)

    @routes.get("/page/{name}")
    async def part(name: str) -> Response:
        return _file(name)

    return routes


def _file(name: str) -> Response:
    if name not in FILES:
        raise HTTPException(HTTPStatus.NOT_FOUND)
    return Response(FILES[name], media_type=KINDS[name.rpartition(".")[2]], headers=HEADERS)
