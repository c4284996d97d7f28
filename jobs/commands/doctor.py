"""`vcal doctor`: what this machine offers, and what to fix."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.console import print_json, size, stdout, table

if TYPE_CHECKING:
    from jobs.doctor import Report


def doctor(
    path: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory whose disk is measured.", exists=True, file_okay=False)
    ] = Path(),
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Check versions, devices, memory, disk and Ray, and say what to fix; exit 1 if something is broken."""
    from jobs.doctor import examine

    report = examine(path)
    if json:
        print_json({**report.facts, "broken": report.broken, "advice": report.advice, "ok": not report.broken})
    else:
        _show(report)
    if report.broken:
        raise typer.Exit(1)


def _show(report: Report) -> None:
    out = stdout()
    packages = table("Packages", "", "package", "installed", "needed")
    for name, item in report.facts["packages"].items():
        mark = "ok" if item["ok"] else "✗"
        packages.add_row(
            mark, name, item["installed"] or "missing", item["required"], style="" if item["ok"] else "red"
        )
    out.print(packages)
    out.print()
    machine = table("Machine", "", "")
    for name, text in _machine(report.facts):
        machine.add_row(name, text)
    out.print(machine)
    out.print()
    fixes = [*((line, "red") for line in report.broken), *((line, "yellow") for line in report.advice)]
    if not fixes:
        out.print("Nothing to fix.", style="green")
        return
    out.print("What to fix", style="bold")
    for line, style in fixes:
        out.print(f"  - {line}", style=style)


def _machine(facts: dict[str, Any]) -> list[tuple[str, str]]:
    processor, torch, memory, shared = facts["processor"], facts["torch"], facts["memory"], facts["shared_memory"]
    disk, ray = facts["disk"], facts["ray"]
    limit = f", limited to {size(memory['limit_bytes'])}" if memory["limit_bytes"] else ""
    lines = [
        ("python", f"{facts['python']['version']} ({facts['python']['executable']})"),
        ("processor", f"{processor['machine']}, {processor['usable_cores']} of {processor['cores']} cores usable"),
        ("memory", f"{size(memory['available_bytes'])} of {size(memory['total_bytes'])} free{limit}"),
        (
            "shared memory",
            f"{size(shared['free_bytes'])} of {size(shared['total_bytes'])} free" if shared else "none on this system",
        ),
    ]
    if "error" in torch:
        lines.append(("torch", torch["error"]))
    else:
        devices = [f"{device['name']} with {size(device['memory_bytes'])}" for device in torch["cuda_devices"]]
        lines.append(("torch", f"{torch['threads']} threads, CUDA devices: {', '.join(devices) or 'none'}"))
    if "error" in disk:
        lines.append(("disk", f"{disk['path']}: {disk['error']}"))
    else:
        speed = f"writes {size(disk['write_bytes_per_s'])}/s, reads {size(disk['read_bytes_per_s'])}/s"
        lines.append(("disk", f"{disk['path']}: {speed}, {size(disk['free_bytes'])} free"))
    lines.append(("Ray", f"{ray['address']}: {ray['detail']}" if ray["address"] else ray["detail"]))
    return lines
