"""The JSON route of the live charts, and plotly.js from the installed wheel."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from core.errors import StoreError
from ui.registry import services


def run_series(request: Request) -> Response:
    """What is new in a run's series since the cursor `after`; 404 where there is no such run."""
    try:
        series = services().run_series(request.path_params["run_id"])
    except StoreError as error:
        return JSONResponse({"problem": error.problem}, status_code=404)
    delta = series.since(request.query_params.get("after", ""))
    return JSONResponse(delta, headers={"cache-control": "no-store"})


def plotly_js(request: Request) -> Response:
    """The plotly.js that belongs to the installed plotly."""
    import plotly

    path = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    return FileResponse(path, media_type="text/javascript", headers={"cache-control": "private, max-age=86400"})
