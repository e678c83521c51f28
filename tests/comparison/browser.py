"""Chromium without a window, by its command line alone: what a page is once it has been laid out."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FOUND = next(filter(None, map(shutil.which, NAMES)), None)
needed = pytest.mark.skipif(FOUND is None, reason="there is no Chromium: on Debian, apt install chromium")

# Lays the page out in frames of several widths, and writes down what it finds in them.
MEASURE = """<!doctype html><meta charset="utf-8"><body>{frames}<script>
addEventListener("load", () => {{
    const found = [...document.querySelectorAll("iframe")].map(frame => {{
        const page = frame.contentDocument, root = page.documentElement;
        const out = [...page.querySelectorAll("body *")].filter(one => !one.closest(".scroll, .picture, pre")
            && one.getBoundingClientRect().right > root.clientWidth + 1);
        return [root.clientWidth, root.scrollWidth, out.map(one => one.tagName + "." + one.className)];
    }});
    document.body.innerHTML = "<pre id=found>" + JSON.stringify(found) + "</pre>";
}});
</script>"""


@dataclass(frozen=True)
class Said:
    """What Chromium gave back, and what the page said on its console, errors among it."""

    output: str
    console: list[str]


def run(page: Path, *options: str) -> Said:
    assert FOUND is not None
    profile = page.parent / "profile"
    fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    fixed += ["--enable-logging=stderr", "--v=0", f"--user-data-dir={profile}", "--virtual-time-budget=2000"]
    done = subprocess.run(
        [FOUND, *fixed, *options, page.as_uri()], capture_output=True, text=True, timeout=60, check=False
    )
    if not profile.is_dir():
        pytest.skip(f"{FOUND} wrote nothing to {page.parent}: as a snap, it has a /tmp of its own")
    done.check_returncode()
    return Said(done.stdout, re.findall(r".*CONSOLE.*", done.stderr))


def widths(page: Path, *of_frame: int) -> Said:
    """Measure a page in frames so wide: a list of (width, width that it takes, elements that stick out)."""
    source = html.escape(page.read_text(), quote=True)
    frames = "".join(
        f'<iframe style="width:{w}px;height:900px;border:0" srcdoc="{source}"></iframe>' for w in of_frame
    )
    wrapper = page.with_name("measure.html")
    wrapper.write_text(MEASURE.format(frames=frames))
    said = run(wrapper, "--dump-dom", f"--window-size={max(of_frame) + 50},1000")
    found = re.search(r'<pre id="found">(.*?)</pre>', said.output, re.DOTALL)
    assert found, said.output[-500:]
    return Said(html.unescape(found[1]), said.console)
