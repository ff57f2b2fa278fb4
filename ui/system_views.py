"""What the doctor found, for a person: what is wrong first, with what to do beside it."""

from __future__ import annotations

import time
from pathlib import Path

import streamlit as st

from core.health.findings import Finding, Report
from core.words import counted, listed
from ui.checkups import Checkup
from ui.words import escaped

BADGES = {
    "problem": (":material/error:", "red", "Problem"),
    "warning": (":material/warning:", "orange", "Warning"),
    "ok": (":material/check_circle:", "green", "OK"),
}


def show_progress(checkup: Checkup) -> None:
    """How far a look is; reruns the page when it is over."""
    if checkup.state != "running":
        st.rerun()
    name, done, total = checkup.progress
    words = f"{done} of {total} looked at, last {name}" if total else "Looking at versions, network and disk"
    st.progress(done / total if total else 0.0, text=words)


def summary(checkup: Checkup, report: Report) -> None:
    """What it comes to, and when that was."""
    counts = report.counts
    bad = [counted(counts[state], state) for state in ("problem", "warning") if counts[state]]
    if counts["problem"]:
        words = "Runs, or parts of this dashboard, will fail until what is named below is mended."
        st.error(f"**{listed(bad)}.** {words}", icon=":material/error:")
    elif bad:
        st.warning(f"**{listed(bad)}.** Runs work; what is named below does not.", icon=":material/warning:")
    else:
        st.success("**Everything is in order.**", icon=":material/check_circle:")
    clock, where = time.strftime("%H:%M:%S", time.localtime(checkup.at)), escaped(report.runtime)
    st.caption(f"{_begun(where)}. Looked at {clock} by this server's clock, in {report.seconds:.0f} s.")


def wrong(findings: list[Finding]) -> None:
    """Each with what to do about it."""
    for finding in findings:
        icon, colour, word = BADGES[finding.state]
        with st.container(border=True):
            left, right = st.columns([3, 2])
            left.markdown(f":{colour}-badge[{icon} {word}] **{_begun(escaped(finding.check))}**")
            left.markdown(escaped(finding.found))
            if finding.fix:
                right.markdown("**What to do**")
                right.markdown(escaped(finding.fix))


def fine(findings: list[Finding]) -> None:
    """In a line each."""
    with st.container(border=True):
        for finding in findings:
            icon, colour, _ = BADGES[finding.state]
            st.markdown(f":{colour}[{icon}] **{_begun(escaped(finding.check))}** {escaped(finding.found)}")


def folders(home: Path, roots: list[Path]) -> None:
    """Where runs lie, and what paths in the forms may lead to."""
    with st.container(border=True):
        st.markdown("**Runs, caches and checkpoints** lie in")
        st.code(str(home), language=None, wrap_lines=True)
        st.markdown("**Data and weights** may be read from")
        st.code("\n".join(map(str, roots)), language=None, wrap_lines=True)
        st.caption("Others are opened by python -m core serve --root DIR, or by FINETUNE_ROOTS.")


def _begun(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}"
