"""Pages of TensorBoard: python docs/pictures/tensorboard_page.py RUN.

Needs Chromium and playwright (pip install playwright).
"""

import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import style
from PIL import Image
from playwright.sync_api import sync_playwright

CHROMIUM = "/usr/bin/chromium"
PORT = 6106


PAGES = {
    "tensorboard": "",
    "tensorboard-speed": "^usage/(ms|samples)",
    "tensorboard-comm": "^usage/comm",
}  # tags of each


def photograph(address: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        for name, tags in PAGES.items():
            for scheme in ("light", "dark"):
                context = browser.new_context(viewport={"width": 1280, "height": 860}, color_scheme=scheme)
                page = context.new_page()
                page.goto(f"{address}/?tagFilter={tags}#timeseries")
                page.wait_for_selector("card-view", timeout=60_000)
                page.wait_for_timeout(5_000)  # curves come one by one
                file = style.HERE / f"{name}-{scheme}.png"
                page.screenshot(path=file)
                small = Image.open(file).convert("P", palette=Image.Palette.ADAPTIVE, colors=64)
                small.save(file, optimize=True)
                context.close()
        browser.close()


if __name__ == "__main__":
    run = Path(sys.argv[1])
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(run.parent),
        "--port",
        str(PORT),
    ]
    server = subprocess.Popen(command)
    try:
        for _ in range(120):
            try:
                urlopen(f"http://localhost:{PORT}").close()
                break
            except URLError:
                time.sleep(1)
        photograph(f"http://localhost:{PORT}")
    finally:
        server.terminate()
        server.wait()
