# SPDX-License-Identifier: Apache-2.0
"""`p4reduce demo`: train a small model with plain DDP and through the switch, side by side."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p4reduce.demo.report import SWITCH_KINDS, DemoOptions, DemoReport
from p4reduce.documents import unwritable, write_json
from p4reduce.signals import termination_raises

if TYPE_CHECKING:
    from rich.console import Console

_PROFILES = ("w34", "w5")
"""Names of p4reduce.wire.PROFILES, which brings numpy along: Ctrl-C while that loads would show a traceback."""
_TITLES = {
    "reference": "plain DDP",
    "reference_other_seed": "plain DDP, another seed",
    "p4reduce": "through the switch",
}


def add(commands: Any) -> None:
    """Add the subcommand to argparse's subparsers."""
    defaults = DemoOptions()
    parser = commands.add_parser(
        "demo",
        help="train a small model with and without the switch",
        description="Starts a switch, a controller and the workers, trains a small language model with plain "
        "DistributedDataParallel and then with its gradients summed by the switch, compares, and stops everything.",
    )
    parser.add_argument(
        "--switch",
        choices=SWITCH_KINDS,
        default=defaults.switch,
        help="embedded: Python, on loopback; bmv2: simple_switch_grpc and network namespaces, needs root; "
        "auto: bmv2 where it is possible (default)",
    )
    parser.add_argument("--workers", type=int, default=defaults.workers, metavar="N", help="default %(default)s")
    parser.add_argument("--steps", type=int, default=defaults.steps, metavar="N", help="default %(default)s")
    parser.add_argument(
        "--loss", type=float, default=defaults.loss, metavar="P", help="chance that the switch loses a frame, each way"
    )
    parser.add_argument("--seed", type=int, default=defaults.seed, metavar="N", help="default %(default)s")
    parser.add_argument("--profile", choices=_PROFILES, default=defaults.profile, help="frame size (default w34)")
    parser.add_argument(
        "--timeout", type=float, default=defaults.timeout, metavar="SECONDS", help="give up after (default %(default)g)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - is standard output")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the demo and show what came out. 1 when the ranks ended with different parameters."""
    from p4reduce.demo.processes import ChildFailed
    from p4reduce.demo.run import require_packages, run_demo

    demo = DemoOptions(
        switch=options.switch,
        workers=options.workers,
        steps=options.steps,
        loss=options.loss,
        seed=options.seed,
        profile=options.profile,
        timeout=options.timeout,
    )
    if options.json is not None:
        check_writable(options.json)
    require_packages()
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    with termination_raises():
        try:
            with Display(console, demo.steps) as display:
                report = run_demo(demo, display)
        except ChildFailed as error:
            print(f"p4reduce demo: {error}", file=sys.stderr)
            return 1
    # The table goes where the JSON does not.
    show(report, console if options.json == "-" else Console(highlight=False))
    if options.json is not None:
        write_json(report.as_dict(), options.json)
    return 0 if report.ranks_bit_identical else 1


def check_writable(target: str) -> None:
    """UsageError when `write_json` could not write there: to be known before the training, not after it.

    Nothing that is there is changed, and nothing new stays.
    """
    path = Path(target)
    if target == "-" or path.is_fifo():  # opening a FIFO would wait for its reader
        return
    try:
        new = not path.exists()
        with path.open("a"):
            pass
        if new:
            path.unlink()
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise unwritable(target, error) from None


class Display:
    """Progress bars on the terminal: one for each run."""

    def __init__(self, console: Console, steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._console = console
        self._tasks = {
            run: self._progress.add_task(title, total=steps, start=False, loss="-.---")
            for run, title in _TITLES.items()
        }
        self._current = ""

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._progress.stop()

    def note(self, text: str) -> None:
        """Print a line above the bars."""
        self._console.print(text)

    def step(self, run: str, step: int, loss: float) -> None:
        """Move the bar of a run."""
        if run != self._current:
            self._current = run
            self._progress.start_task(self._tasks[run])
        self._progress.update(self._tasks[run], completed=step, loss=f"{loss:.3f}")


def show(report: DemoReport, console: Console) -> None:
    """Print the result as a table."""
    from rich.table import Table

    table = Table(
        title=f"{report.steps} steps, {report.workers} workers, {report.parameters:,} parameters", min_width=60
    )
    table.add_column()
    table.add_column("plain DDP", justify="right")
    table.add_column("through the switch", justify="right")
    table.add_row("loss before", f"{report.loss_first:.4f}", f"{report.loss_first:.4f}")
    table.add_row("loss after", f"{report.loss_reference:.4f}", f"{report.loss_p4reduce:.4f}")
    table.add_row("  with another seed", f"{report.loss_reference_other_seed:.4f}", "")
    table.add_row("seconds", f"{report.seconds_reference:.1f}", f"{report.seconds_p4reduce:.1f}")
    for part, milliseconds in report.step_milliseconds.items():
        table.add_row(f"  ms per step: {part}", "", f"{milliseconds:.1f}")
    table.add_row("buckets: switch path", "", f"{report.buckets_switch:,}")
    table.add_row("buckets: ring path", "", f"{report.buckets_ring:,}")
    table.add_row("frames sent by all workers", "", f"{report.frames_sent:,}")
    table.add_row("  of these sent again", "", f"{report.retransmissions:,}")
    console.print(table)
    for sentence in sentences(report):
        console.print(sentence)


def sentences(report: DemoReport) -> list[str]:
    """What the numbers mean."""
    if report.ranks_bit_identical:
        same = (
            f"All {report.workers} ranks ended with the same parameters, bit for bit ({report.parameters_sha256[:16]})."
        )
    else:
        same = "THE RANKS ENDED WITH DIFFERENT PARAMETERS."
    difference = abs(report.loss_p4reduce - report.loss_reference)
    spread = abs(report.loss_reference_other_seed - report.loss_reference)
    verdict = "less" if report.closer_than_seeds else "not less"
    change = f"changed the final loss by {difference:.1g}" if difference else "changed the final loss by nothing"
    return [
        same,
        f"The switch {change}, {verdict} than another seed does ({spread:.1g}); "
        f"exactly it is {report.loss_p4reduce_hex}.",
        f"Switch {report.switch}, profile {report.profile}, frame loss {report.frame_loss:g}; "
        f"{report.seconds:.0f} s in all.",
    ]
