# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Pages in a headless Chromium: their content after their scripts have run, and their log lines."""

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_OPTIONS = ["--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
_OPTIONS += ["--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--virtual-time-budget=20000"]
_OPTIONS += ["--dump-dom", "--allow-file-access-from-files"]  # a page looks into its frames
# Frames have any width, and a window of Chromium has at least 500 pixels.
_AROUND = """<!DOCTYPE html><body>{frames}<pre id="answer"></pre><script>
const look = {look};
addEventListener("load", () => {{
  const answer = {{}};
  for (const frame of document.querySelectorAll("iframe")) {{
    try {{
      answer[frame.name] = look(frame.contentWindow, frame.contentDocument);
    }} catch (error) {{
      answer[frame.name] = {{ error: String(error.stack) }};
    }}
  }}
  document.getElementById("answer").textContent = JSON.stringify(answer);
}});
</script></body>"""


def look_at(pages: Mapping[str, tuple[str, int]], look: str, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Open pages, by name with their HTML and width in pixels, in an empty folder; return what ``look`` returns in
    each, a JavaScript function of a window and its document, and the lines that they have logged."""
    assert CHROMIUM is not None
    frames = []
    for name, (text, width) in pages.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
        style = f"width:{width}px;height:800px;border:0"
        frames.append(f'<iframe name="{name}" src="{name}.html" style="{style}"></iframe>')
    around = folder / "around.html"
    around.write_text(_AROUND.format(frames="".join(frames), look=look), encoding="utf-8")
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has none for root
    command = [CHROMIUM, *_OPTIONS, *sandbox, f"--user-data-dir={folder / 'profile'}", around.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    answer = re.search(r'<pre id="answer">(.*?)</pre>', done.stdout, re.DOTALL)
    assert answer is not None and answer[1], done.stderr
    return json.loads(html.unescape(answer[1])), [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
