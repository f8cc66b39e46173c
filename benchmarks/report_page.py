"""The HTML report of a large plan: its size, and the seconds until a browser has laid it out.

    python benchmarks/report_page.py                GPT-3, 96 layers on 1,024 devices; writes report_page.json
    python benchmarks/report_page.py --layers 4     a smaller one
    python benchmarks/report_page.py --output benchmarks/results/report_page.json    records the run

Asked: below 5 MB, and below 2 s. The browser is chromium, without a window; it begins anew for each of the rounds.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import gpt3
from race import machine

import shardwright as sw

ROUNDS = 5

#: At the end of the page: the milliseconds from the begin of its loading until all of it has a place.
PROBE = """<script>addEventListener("load", () => {
  document.body.offsetHeight;
  const seen = document.createElement("pre");
  seen.id = "seen"; seen.textContent = performance.now(); document.body.append(seen);
});</script></body>"""


def opened(page: Path, browser: str) -> float:
    """Seconds until the browser has laid the page out."""
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent / 'profile'}"]
    command = [browser, *flags, "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    (milliseconds,) = re.findall(r'<pre id="seen">([\d.]+)</pre>', done.stdout)
    return float(milliseconds) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=gpt3.LAYERS)
    parser.add_argument("--output", type=Path, default=Path("report_page.json"))
    chosen = parser.parse_args()
    browser = shutil.which("chromium") or sys.exit("no chromium is installed")
    plan = sw.plan(**gpt3.gpt3(chosen.layers), devices=1024, cluster="h200x8x128")
    with TemporaryDirectory() as folder:
        page = Path(folder) / "plan.html"
        plan.report(page)
        size = page.stat().st_size
        page.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE), encoding="utf-8")
        seconds = [opened(page, browser) for _ in range(ROUNDS)]
    figures = {
        "machine": machine(),
        "layers": chosen.layers,
        "bytes": size,
        "seconds": seconds,
        "median": statistics.median(seconds),
    }
    chosen.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(f"{size / 1e6:.2f} MB, opened in {figures['median']:.2f} s ({min(seconds):.2f} to {max(seconds):.2f})")


if __name__ == "__main__":
    main()
