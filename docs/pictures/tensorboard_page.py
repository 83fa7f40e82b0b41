"""Pages of TensorBoard: python docs/pictures/tensorboard_page.py RUN SWEEP.

RUN is a run directory of `torchrun --nproc_per_node=2 train.py strategy=ddp comm=ring`, SWEEP of a sweep.
Needs Chromium and playwright (pip install playwright).
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import style
from PIL import Image
from playwright.sync_api import sync_playwright

CHROMIUM = "/usr/bin/chromium"
ADDRESS = "http://localhost:6106"

RUN_PAGES = {
    "tensorboard": "?tagFilter=#timeseries",
    "tensorboard-speed": "?tagFilter=^usage/(ms|samples)#timeseries",
    "tensorboard-comm": "?tagFilter=^usage/comm#timeseries",
    "tensorboard-losses": "#custom_scalars",
}
SWEEP_PAGES = {"tensorboard-hparams": "#hparams"}


def photograph(pages: dict[str, str]) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        for name, page_address in pages.items():
            for scheme in ("light", "dark"):
                context = browser.new_context(viewport={"width": 1280, "height": 640}, color_scheme=scheme)
                page = context.new_page()
                page.goto(f"{ADDRESS}/{page_address}")
                page.wait_for_timeout(8_000)  # curves are loaded one by one
                if page_address.endswith("#timeseries"):
                    page.get_by_text("Settings", exact=True).first.click()  # closes the panel
                    page.wait_for_timeout(2_000)
                file = style.HERE / f"{name}-{scheme}.png"
                page.screenshot(path=file)
                small = Image.open(file).convert("P", palette=Image.Palette.ADAPTIVE, colors=64)
                small.save(file, optimize=True)
                context.close()
        browser.close()


@contextmanager
def served(folder: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", folder.name, "--port", "6106"]
    server = subprocess.Popen(command, cwd=folder.parent)
    try:
        for _ in range(120):
            try:
                urlopen(ADDRESS).close()
                break
            except URLError:
                time.sleep(1)
        yield
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    run, sweep = map(Path, sys.argv[1:])
    with served(run.parent):
        photograph(RUN_PAGES)
    with served(sweep):
        photograph(SWEEP_PAGES)
