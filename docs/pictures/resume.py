"""A terminal: a run is killed, resumed, and ends with the bits of another that nobody disturbed.

Needs rich (pip install rich): python docs/pictures/resume.py. The commands run, and their output is
recorded; of a long output the lines that match KEPT are shown.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

HERE = Path(__file__).parent
COLUMNS = 62  # 11 pixels a line on a page of 400
TRAIN = "torchrun --standalone --nproc_per_node=2 train.py"
COMMANDS = [
    f"{TRAIN} \\\n    run_dir=runs/whole",
    f"{TRAIN} \\\n    run_dir=runs/killed &\n"
    "  tail -F runs/killed/train.log | grep -qm1 'step 4[0-9]*/'\n"
    "  pkill -KILL --newest -f run_dir=runs/killed; wait",
    f"{TRAIN} \\\n    run_dir=runs/killed resume=auto",
    "grep -o 'sha256\": \"[0-9a-f]\\{16\\}' runs/*/result.json",
]
KEPT = {
    r"^finished": "",
    r"^rank .*died of SIGKILL": "bold red",
    r"^resumed from": "bold yellow",
    r"^runs/.*sha256": "bold green",
}
THEME = TerminalTheme(
    (13, 17, 23),
    (230, 237, 243),
    [(72, 79, 88), (255, 123, 114), (63, 185, 80), (210, 153, 34), (88, 166, 255)] + [(230, 237, 243)] * 3,
)
# rich's own form, without the font that it fetches from a server.
FORM = """<svg viewBox="0 0 {width} {height}" width="620" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


def record(command: str, folder: Path, console: Console) -> None:
    """Run `command` in `folder`, and print it and what it said."""
    line = command.replace("torchrun", f"{sys.executable} -m torch.distributed.run")
    line = line.replace("train.py", str(HERE.parents[1] / "train.py"))
    done = subprocess.run(
        line, shell=True, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    console.print(Text(f"$ {command}", style="bold"))
    shown = True
    for line in done.stdout.splitlines():
        styles = [style for pattern, style in KEPT.items() if re.search(pattern, line)]
        if styles:
            console.print(Text(line.strip(), style=styles[0]), soft_wrap=False)
        elif shown:
            console.print(Text("...", style="dim"))
        shown = bool(styles)
    console.print()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        console = Console(record=True, width=COLUMNS, force_terminal=True, highlight=False)
        for command in COMMANDS:
            record(command, Path(folder), console)
    svg = console.export_svg(title="", theme=THEME, code_format=FORM, unique_id="resume")
    (HERE / "resume.svg").write_text(svg)
