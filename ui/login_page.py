"""The one page that who has no token gets to see; it holds nothing of the app."""

from __future__ import annotations

from html import escape

from core.words import time_in_words

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="robots" content="noindex"><title>Token needed</title><style>
:root {{ color-scheme: light dark; --back: #fbfcfc; --card: #fff; --text: #1c2b2d; --line: #d8e0e0; --main: #0f766e; --bad: #b42318; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --back: #11181a; --card: #1a2426; --text: #e3eaea; --line: #2c393b; --main: #2b9c90; --bad: #ff8a7a; }} }}
body {{ margin: 0; min-height: 100vh; display: grid; place-items: center; background: var(--back); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }}
main {{ width: min(24rem, calc(100vw - 4rem)); background: var(--card); border: 1px solid var(--line); border-radius: 0.6rem;
  padding: 1.5rem; }}
h1 {{ font-size: 1.25rem; margin: 0 0 0.5rem; }} p {{ margin: 0 0 1rem; }} label {{ display: block; font-size: 0.875rem; }}
input {{ box-sizing: border-box; width: 100%; font: inherit; padding: 0.5rem; margin: 0.25rem 0 1rem; color: inherit;
  background: var(--back); border: 1px solid var(--line); border-radius: 0.4rem; }}
button {{ font: inherit; width: 100%; padding: 0.5rem; color: #fff; background: var(--main); border: 0; border-radius: 0.4rem; }}
input:focus-visible, button:focus-visible {{ outline: 2px solid var(--main); outline-offset: 2px; }}
.problem {{ color: var(--bad); }}
</style></head><body><main><h1>{title}</h1><p{kind} role="status">{words}</p>
<form method="post" action="/login"><label for="token">Token</label>
<input id="token" name="token" type="password" autocomplete="current-password" autocapitalize="off" spellcheck="false" required autofocus>
<button>Open the dashboard</button></form></main></body></html>
"""  # noqa: E501 - a page's lines


def login_page(problem: str = "", *, title: str = "This dashboard needs its token") -> bytes:
    """The page as HTML, in UTF-8.

    Args:
        problem: what went wrong, instead of where the token is to be found.
    """
    words = problem or "The token is in the link that was printed when the dashboard was started."
    kind = ' class="problem"' if problem else ""
    return _PAGE.format(title=escape(title), kind=kind, words=escape(words)).encode()


def wrong_token() -> bytes:
    """The page after a wrong token."""
    return login_page("This token is not the one of this dashboard. A dashboard that was started anew has another one.")


def wait(seconds: float) -> bytes:
    """The page for a client that has to wait before its next try."""
    return login_page(f"Too many wrong tokens came from your address. Try again in {time_in_words(seconds)}.")


def logged_out() -> bytes:
    """The page after a log-out."""
    return login_page(title="You are logged out")
