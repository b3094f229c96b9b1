"""The metrics of a finished run as tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedcore.tools import PROTOCOLS, output, protocols, rounds

TIMED = ("selection", "broadcast", "local_training", "collection", "aggregation", "evaluation", "checkpoint")

WIDE = 120
"""The characters in which the table of protocols shows every column. In fewer, rich cuts words or numbers off."""


def summary_tables(summary: Mapping[str, Any], width: int) -> Group:
    """Return the tables of a ``summary.json`` for a console of so many characters."""
    return Group(
        metrics_tables(summary["metrics"], width),
        "",
        traffic_table(summary["bytes"], summary["rounds"]),
        "",
        *([system_line(summary["system"])] if "system" in summary else []),
        *filter(None, (report_line(plugin, figures) for plugin, figures in summary.get("reports", {}).items())),
        time_line(summary),
    )


def metrics_tables(metrics: Mapping[str, Any], width: int) -> Group:
    """Return the table of all protocols, followed by the other metrics."""
    return Group("", protocol_table(metrics, width), *_further_table(metrics), "", *_footnotes(metrics))


def _further_table(metrics: Mapping[str, Any]) -> list[RenderableType]:
    """Return the table of the metrics next to accuracy and loss; empty if the run has none."""
    rows = rounds.evaluated(metrics)
    names = list(dict.fromkeys(name for row in rows.values() for name in protocols.further(row)))
    table = _table("Metrics")
    table.add_column("protocol", no_wrap=True)
    for name in names:
        table.add_column(output.clean(name), justify="right")
    for protocol, row in rows.items():
        over = {name: f" (over {count})" for name, count in row.get("mean_over", {}).items()}
        means = {} if PROTOCOLS[protocol].on_clients else over
        table.add_row(protocol, *(output.number(row.get(name)) + means.get(name, "") for name in names))
        if PROTOCOLS[protocol].on_clients:
            cells = (output.number(row.get(f"{name}_mean")) + over.get(name, "") for name in names)
            table.add_row("  mean over clients", *cells, style="dim")
    return ["", table] if names else []


def protocol_table(metrics: Mapping[str, Any], width: int) -> Table:
    """Return a table with a row for each protocol that the run measured.

    With figures over clients it needs ``WIDE`` characters. With fewer it does not say what a protocol measures.
    """
    rows = rounds.evaluated(metrics)
    spread = any("std" in row for row in rows.values())
    wide = width >= WIDE or not spread
    table = _table("Evaluation")
    table.collapse_padding = not wide
    table.add_column("protocol", no_wrap=True)
    if wide:
        table.add_column("of what", style="dim")
    figure = "accuracy %" if any("accuracy" in row for row in rows.values()) or not rows else "figure"
    for heading in (figure, "loss", *(("std %", "worst 10 %", "clients", "untrained") if spread else ())):
        table.add_column(heading if wide else heading.replace(" ", "\n", 1), justify="right", no_wrap=True)
    if metrics.get("global") is None:
        reason = output.text(metrics.get("global_reason", "no global model"))
        table.add_row("global", *([reason] if wide else []), "-", "-")
        table.caption = None if wide else reason
    for name, row in rows.items():
        cells = [PROTOCOLS[name].heading] if wide else []
        cells += [rounds.in_short(row).removesuffix(" %"), output.number(row["loss"])]
        if spread and "std" in row:
            cells += [
                output.percent(row["std"]),
                output.percent(row["worst10"]),
                str(row["clients"]),
                str(row["untrained"]),
            ]
        table.add_row(name, *cells)
    return table


def traffic_table(ledger: Mapping[str, Any], rounds: int) -> Table:
    """Return the bytes per round and in total, by sender."""
    table = _table("Traffic of all clients")
    table.add_column("sent by", no_wrap=True)
    for heading in ("down / round", "up / round", "down", "up"):
        table.add_column(heading, justify="right", no_wrap=True)
    senders = dict(ledger["by_plugin"])
    if len(senders) > 1:
        senders["total"] = {"down": ledger["down"], "up": ledger["up"]}
    for sender, counts in senders.items():
        down, up = counts["down"], counts["up"]
        table.add_row(output.text(sender), *map(output.size, (down / rounds, up / rounds, down, up)))
    return table


def system_line(counts: Mapping[str, Any]) -> Text:
    """Return the participation over all rounds of a run with a simulated system."""
    words = rounds.in_words(counts["selected"], counts["accepted"], counts["partial"], counts["lost"])
    return Text.assemble(
        ("took part: ", "bold"), f"{output.clean(words)}, in {output.duration(counts['virtual_time'])} of virtual time"
    )


def report_line(plugin: str, figures: Mapping[str, Any]) -> Text | None:
    """Return a plugin's report on the whole run, without lists, which summary.json has; None if that leaves nothing."""
    single = {name: value for name, value in figures.items() if not isinstance(value, list)}
    parts = (f"{name} {f'{value:.4g}' if isinstance(value, float) else value}" for name, value in single.items())
    return Text.assemble((f"{output.clean(plugin)}: ", "bold"), output.clean(", ".join(parts))) if single else None


def time_line(summary: Mapping[str, Any]) -> Text:
    """Return the time split of the process that finished the run. The line names its rounds if they are not all."""
    spent, rounds = summary["time"], summary["rounds"]
    timed = spent.get("rounds", rounds)
    part = f" of the last {timed} of {rounds} rounds" if timed < rounds else ""
    each = defaultdict(float, spent["per_round"])  # empty if no round was left to train
    parts = [f"local training {output.duration(each['local_training'])}"]
    parts += [
        f"aggregation {output.duration(each['aggregation'])}",
        f"evaluation {output.duration(each['evaluation'])}",
    ]
    whole = each["client_seconds"]
    terms = [
        f"{output.clean(name)} {100 * seconds / whole:.0f} %"
        for name, seconds in each["plugin_terms"].items()
        if whole > 0
    ]
    line = Text.assemble(
        (f"time{part}: ", "bold"), f"{output.duration(summary['seconds'])}; per round {', '.join(parts)}"
    )
    line.append(f"; of the clients' time {', '.join(terms)}" if terms else "")
    line.append(f"; workers {spent['workers']}, peak memory {spent['peak_memory_mib']:.0f} MiB")
    return line


def profile_table(spent: Mapping[str, Any]) -> Table:
    """Return the seconds of a round by part, and the plugins' share of the clients' time."""
    each = defaultdict(float, spent["per_round"])  # empty if no round was left to train
    whole = each["round"] + each["evaluation"] + each["checkpoint"]
    table = _table("Where a round's time goes")
    table.add_column("part", no_wrap=True)
    table.add_column("s / round", justify="right", no_wrap=True)
    table.add_column("%", justify="right", no_wrap=True)
    table.add_column("of", style="dim")

    def row(name: str, seconds: float, total: float, total_of: str) -> None:
        percent = f"{100 * seconds / total:.1f}" if total > 0 else "-"
        table.add_row(output.text(name), f"{seconds:.3f}", percent, total_of)

    for part in TIMED:
        row(part.replace("_", " "), each[part], whole, "the round")
    capacity = each["client_seconds"] + each["idle_workers"]
    row("clients at work", each["client_seconds"], capacity, f"{spent['workers']} workers' time")
    row("idle workers", each["idle_workers"], capacity, f"{spent['workers']} workers' time")
    for name, seconds in each["plugin_terms"].items():
        row(f"hooks of {output.clean(name)}", seconds, each["client_seconds"], "the clients' work")
    return table


def _table(title: str) -> Table:
    look = box.SIMPLE_HEAD
    return Table(
        title=title, title_justify="left", title_style="bold not italic", box=look, show_edge=False, pad_edge=True
    )


def _figure(name: str, value: float | None) -> str:
    if name == "accuracy":
        return f"{output.percent(value)} %"
    is_share = name in protocols.SIGNS and name != "loss"
    return f"{output.clean(name)} {f'{output.percent(value)} %' if is_share else output.number(value)}"


def _footnotes(metrics: Mapping[str, Any]) -> Iterator[RenderableType]:
    overall = metrics.get("global") or {}
    if domains := overall.get("domains"):
        figure = protocols.figure_of(overall)
        shown, unit = (output.percent, " %") if figure == "accuracy" else (output.number, "")
        each = ", ".join(f"{output.clean(name)} {shown(value)}" for name, value in domains.items())
        yield Text.assemble((f"{output.clean(figure)}{unit} by domain: ", "bold"), each)
    best = metrics.get("best_by_validation")
    if best:
        figure = next(name.removeprefix("validation_") for name in best if name.startswith("validation_"))
        line = f"round {best['round']}, {best['validation']} {_figure(figure, best[f'validation_{figure}'])}"
        if f"global_{figure}" in best:
            line += f", global {_figure(figure, best[f'global_{figure}'])} there"
        if "global_before_correction" in metrics:
            line += ", before the correction"
        yield Text.assemble(("best by validation: ", "bold"), line)
    for problem in (rounds.not_evaluated(metrics), rounds.undefined(metrics)):
        if problem:
            yield Text(output.clean(problem), style="yellow")
