"""Data: what a data set holds, seen before it is trained on."""

from __future__ import annotations

import streamlit as st

from core.config import field_errors
from ui import data_views, forms, uploads
from ui.registry import services
from ui.scans import ScanJob

SPLIT_FIELDS = ("val_percent", "seed", "val_duplicates")


def look(anew: bool = False) -> None:
    """Scan what the form asks for."""
    services().scans.scan(data_views.scan_key(), anew=anew)


def take_upload(path: str) -> None:
    """Choose the folder that an upload has become, and look at it."""
    st.session_state[forms.key_of("data")] = path
    look()


def draw_choice(state: str) -> None:
    problems = field_errors(forms.values())
    is_running = state == "running"
    with st.container(border=True):
        forms.field("data", problems, options=forms.data_options(services().store))
        with st.expander("How it is divided", icon=":material/call_split:"):
            for column, name in zip(st.columns(len(SPLIT_FIELDS)), SPLIT_FIELDS, strict=True):
                with column:
                    forms.field(name, problems)
        draw_upload()
        cannot = is_running or bool(problems.keys() & {"data", *SPLIT_FIELDS})
        with st.container(horizontal=True, vertical_alignment="center"):
            st.button("Look at it", type="primary", icon=":material/search:", disabled=cannot, on_click=look)
            if state and not is_running:
                st.button(
                    "Rescan",
                    icon=":material/refresh:",
                    disabled=cannot,
                    on_click=look,
                    args=(True,),
                    help="Decode every image again. Look at it reads only files that are new or changed.",
                )
            st.page_link("../pages/train.py", label="Train on it", icon=":material/model_training:")


def draw_upload() -> None:
    # with a key it stays open when an upload has come
    with st.expander("Upload an archive", icon=":material/upload:", key="upload_part"):
        uploads.upload_field(take_upload)
        uploads.uploads_list(take_upload)


def draw_report(job: ScanJob) -> None:
    dataset = job.dataset
    if dataset is None:
        return
    data_views.header(dataset)
    st.subheader("Classes", anchor=False)
    data_views.classes(job)
    st.subheader("Samples", anchor=False)
    st.fragment(data_views.samples)(job)
    st.subheader("First batch", anchor=False)
    st.fragment(data_views.training_batch)(job)
    st.subheader("Sizes", anchor=False)
    data_views.image_sizes(job)
    st.subheader("Left out", anchor=False)
    st.fragment(data_views.left_out)(job)
    st.subheader("Duplicates", anchor=False)
    data_views.duplicates(job)


st.title("Data", anchor=False)
forms.fill_in()
job = services().scans.find(data_views.scan_key())
# read once: the scan may end while the page is drawn
state = job.state if job is not None else ""
draw_choice(state)
if job is None:
    if words := forms.data_caption(st.session_state[forms.key_of("data")]):
        st.info(words, icon=":material/info:")
    st.caption("Look at it shows what these data hold. Each image is decoded once; 100,000 take some minutes.")
elif state == "running":
    st.fragment(data_views.show_progress, run_every=0.5)(job)
elif state == "failed":
    st.error(f"**{data_views.escaped(job.problem)}** {data_views.escaped(job.fix)}", icon=":material/error:")
else:
    draw_report(job)
