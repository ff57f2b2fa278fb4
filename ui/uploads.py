"""Uploads on the Data page: a field that sends an archive in slices, and the list of those that are kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import streamlit as st

from core.browser.shelf import UploadError, gib
from core.browser.uploads import Incoming
from core.errors import AppError
from ui.registry import services
from ui.words import escaped

KEY = "upload"
SILENT_AFTER_S = 15.0
"""Seconds without a byte after which an upload is listed as standing still."""
HTML = """
<div class="upload-box">
  <div class="upload-drop">
    <button type="button" class="upload-choose">Choose an archive</button>
    <span class="upload-hint"></span>
    <input class="upload-input" type="file" hidden accept=".zip,.tar,.tgz,.tbz,.tbz2,.txz,.gz,.bz2,.xz">
  </div>
  <div class="upload-job" hidden>
    <div class="upload-name"></div>
    <progress class="upload-bar" max="1" aria-label="Upload"></progress>
    <div class="upload-row">
      <span class="upload-words" role="status"></span>
      <button type="button" class="upload-again">Try again</button>
      <button type="button" class="upload-cancel">Cancel</button>
    </div>
  </div>
</div>
"""
_HERE = Path(__file__).parent
_mount = st.components.v2.component(
    "finetune_upload",
    html=HTML,
    css=(_HERE / "uploads.css").read_text(encoding="utf-8"),
    js=(_HERE / "uploads.js").read_text(encoding="utf-8"),
    isolate_styles=False,
)


def upload_field(take: Callable[[str], None]) -> None:
    """The field.

    Args:
        take: called with the path of the folder that an upload has become.
    """
    limits = services().uploads.limits

    def hand_on() -> None:
        # what a browser says is looked up, not believed
        said = st.session_state[KEY].get("uploaded")
        for kept in services().uploads.kept():
            if kept.name == said:
                take(str(kept.path))

    hint = f"Or drop it here: a .zip or .tar of class folders, up to {gib(limits.size_bytes)}."
    _mount(key=KEY, data={"limit": limits.size_bytes, "hint": hint}, on_uploaded_change=hand_on)


def uploads_list(take: Callable[[str], None]) -> None:
    """Those that are kept, and those that stand still, each with a way to be rid of it."""
    uploads = services().uploads
    kept = uploads.kept()
    if problem := st.session_state.pop("upload_problem", None):
        st.error(escaped(problem))
    for upload in uploads.under_way():
        if upload.state == "receiving" and uploads.silent_s(upload) > SILENT_AFTER_S:
            _silent(upload)
    for item in kept:
        with st.container(horizontal=True, vertical_alignment="center", wrap=False):
            st.markdown(f"{escaped(item.name)} :gray[{gib(item.size_bytes)}]", width="stretch")
            st.button("Use", key=f"use_{item.name}", on_click=take, args=(str(item.path),))
            st.button(
                "", key=f"remove_{item.name}", icon=":material/delete:", type="tertiary", on_click=_remove,
                args=(item.name,), help="Remove",
            )  # fmt: skip
    if kept:
        st.caption(f"{len(kept)} of {uploads.limits.kept} kept, as unpacked folders.")


def remove_upload(name: str) -> None:
    """Delete an upload that lies ready.

    Raises:
        UploadError: a run or a scan uses it.
    """
    store, uploads = services().store, services().uploads
    fix = "Stop it, or wait until it has ended."
    for kept in uploads.kept():
        if kept.name == name:
            spec = str(kept.path)
            for run in store.list_runs(active_only=True, with_probes=True):
                if _leads_to(run.config.data, kept.path):
                    raise UploadError(409, f"'{name}' is used by the run {run.name} ({run.run_id}).", fix=fix)
            if services().scans.is_reading(spec):
                raise UploadError(409, f"'{name}' is being looked at.", fix=fix)
            uploads.remove(name)


def _leads_to(spec: str, folder: Path) -> bool:
    from core.data.sources import paths_in

    try:
        return any(Path(path).expanduser().resolve().is_relative_to(folder.resolve()) for path in paths_in(spec))
    except (OSError, ValueError, RuntimeError):
        return False


def _silent(upload: Incoming) -> None:
    with st.container(horizontal=True, vertical_alignment="center"):
        st.markdown(
            f"{escaped(upload.name)} :gray[{gib(upload.offset)} of {gib(upload.size_bytes)} came; choosing the file "
            "again goes on from there]",
            width="stretch",
        )
        st.button(
            "Cancel", key=f"drop_{upload.upload_id}", type="tertiary", on_click=services().uploads.cancel,
            args=(upload.upload_id,),
        )  # fmt: skip


def _remove(name: str) -> None:
    try:
        remove_upload(name)
    except (AppError, OSError) as error:
        st.session_state["upload_problem"] = str(error)
