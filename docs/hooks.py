"""Fills documentation pages with tables that come from the abi, so that they cannot fall behind it.

A line `@layout descriptor.ATTEND` becomes the field table of `nearkv_hw.abi.descriptor.ATTEND`;
`@block hdm.DECODER` that of a block of registers;
`@enum descriptor.Status` becomes the members of an enumeration with their meaning; `@config` the presets;
`@dram dram.DDR5_6400` the values of a DRAM part, `@densities` what depends on its density, and `@frames` what
its rules are for a controller; `@links` what each CXL link carries; `@registers` a
command window's register lines. Of estimates, `@models` and `@gpus` are the tables of both, `@accuracy` the
timing model's errors, `@workloads` each of them, `@published` figures of others beside ours, `@energies`
energies with their sources. `@presets` are the formats of `nearkv.quantise`.
"""

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
from operator import attrgetter

from nearkv.estimate import CONFIGS, FORMATS, GPUS, Value, energy, model, setup
from nearkv.estimate.measured import errors, measurements
from nearkv.estimate.published import comparisons
from nearkv.quantise import PRESETS as FORMAT_PRESETS
from nearkv_hw.abi import LINE_BYTES, PRESETS, window
from nearkv_hw.abi.dram import MEANINGS, PARTS, Dram, FrameTimings, LateTimings, Refresh, ceiling
from nearkv_hw.abi.link import RATES, lines_per_cycle, ports

DIRECTIVE = re.compile(
    r"^@(layout|block|enum|config|dram|densities|frames|links|registers|models|gpus|accuracy|workloads|published|energies|presets)"
    r"(?: (\w+)\.(\w+))?$",
    re.MULTILINE,
)


def on_page_markdown(markdown, **_):
    """Replace every directive of a page by its table."""
    return DIRECTIVE.sub(lambda match: TABLES[match[1]](match[2], match[3]), markdown)


def _row(cells):
    return f"| {' | '.join(cells)} |"


def _layout(module, name):
    layout = getattr(importlib.import_module(f"nearkv_hw.abi.{module}"), name)
    rows = ["| bits | field | meaning |", "|---|---|---|"]
    for field in layout:
        low = layout.offset(field.name)
        high = low + field.width - 1
        label = (
            "reserved, zero" if field.reserved else f"`{field.name}`" + (", signed" if field.signed else "")
        )
        rows.append(f"| {high if high == low else f'{high}:{low}'} | {label} | {field.doc} |")
    return "\n".join(rows)


def _block(module, name):
    """Every field of a block of registers, with its place, its access and its value after reset."""
    block = getattr(importlib.import_module(f"nearkv_hw.abi.{module}"), name)
    rows = [
        f"**{block.name}**, {block.size} bytes",
        "",
        "| offset | register | bits | field | access | after reset | meaning |",
        "|---|---|---|---|---|---:|---|",
    ]
    for register in block:
        for field in register:
            if field.reserved:
                continue
            low = register.offset(field.name)
            high = low + field.width - 1
            cells = (
                f"{register.at:#x}",
                f"`{register.name}`",
                str(high) if high == low else f"{high}:{low}",
                f"`{field.name}`",
                register.access(field.name).value,
                f"{field.reset:#x}" if field.reset else "0",
                field.doc or ("" if len(register.fields) > 2 else register.doc),
            )
            rows.append(_row(cells))
    return "\n".join(rows)


def _enum(module, name):
    source_module = importlib.import_module(f"nearkv_hw.abi.{module}")
    kind = getattr(source_module, name)
    meanings = _member_docs(source_module, name)
    rows = ["| value | name | meaning |", "|---|---|---|"]
    rows += [f"| {member.value} | `{member.name}` | {meanings.get(member.name, '')} |" for member in kind]
    return "\n".join(rows)


def _member_docs(module, name):
    """The string after each member's assignment, as the source has it."""
    tree = ast.parse(inspect.getsource(module))
    return _constant_docs(
        next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    )


def _constant_docs(node):
    """The string after each assignment in the body of a module or class."""
    return {
        statement.targets[0].id: " ".join(following.value.value.split())
        for statement, following in itertools.pairwise(node.body)
        if isinstance(statement, ast.Assign)
        and isinstance(following, ast.Expr)
        and isinstance(following.value, ast.Constant)
    }


def _registers(*_):
    """What each register line is, as the names and texts of the constants in `abi.window` say."""
    docs = _constant_docs(ast.parse(inspect.getsource(window)))
    rows = ["| register line | what |", "|---:|---|"]
    rows += [
        f"| {getattr(window, name)} | {doc.removeprefix('Register line of ')} |"
        for name, doc in docs.items()
        if name.endswith("_LINE")
    ]
    return "\n".join(rows)


def _config(*_):
    presets = {name: config.to_dict() for name, config in PRESETS.items()}
    fields = [field for field in next(iter(presets.values())) if field != "name"]
    rows = [
        "| field | " + " | ".join(f"`{name}`" for name in presets) + " |",
        "|---" * (len(presets) + 1) + "|",
    ]
    rows += [
        f"| `{field}` | " + " | ".join(str(p[field]) for p in presets.values()) + " |" for field in fields
    ]
    return "\n".join(rows)


def _dram(_, name):
    """The timing values of a part, with where they come from."""
    part = PARTS[Dram[name]]
    rows = ["| name | value | unit | tCK | what it is | source | sure |", "|---|---:|---|---:|---|---|---|"]
    for key, meaning in MEANINGS.items():
        if key in part.values:
            value = part.values[key]
            cells = (
                f"`{key}`",
                f"{value.value:g}",
                value.unit,
                str(part.n(key)) if value.unit else "",
                *(meaning, value.source, value.sure),
            )
            rows.append(_row(cells))
    return "\n".join(rows)


def _densities(*_):
    rows = [
        "| part | Gbit | rows of a bank | all-bank refresh | of a set | channel | ceiling | sources |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for part in PARTS.values():
        for gbit, density in part.densities.items():
            values = (density.rows, density.rfc, density.rfc_set)
            cells = (
                part.dram.name,
                f"{gbit} (default)" if gbit == part.default_density else str(gbit),
                f"{part.rows_of(gbit):,}",
                *(f"{value.value:g} ns" for value in values[1:]),
                f"{part.channel_lines(gbit) * LINE_BYTES / 2**30:g} GiB",
                f"{100 * ceiling(part, gbit, Refresh.ALL_BANK):.1f} %",
                "; ".join(f"{value.source} ({value.sure})" for value in values),
            )
            rows.append(_row(cells))
    return "\n".join(rows)


def _frames(*_):
    parts = PARTS.values()
    columns = [part.frames(part.default_density, Refresh.ALL_BANK) for part in parts]
    rows = [
        "| distance, frames | " + " | ".join(part.dram.name for part in parts) + " |",
        "|---" + "|---:" * len(columns) + "|",
    ]
    names = [field.name for field in dataclasses.fields(FrameTimings) if field.name != "late"]
    late = [f"late.{field.name}" for field in dataclasses.fields(LateTimings)]
    rows += [
        f"| `{name}` | " + " | ".join(_distance(column, name) for column in columns) + " |"
        for name in (*names, *late)
    ]
    return "\n".join(rows)


def _distance(timings, name):
    """One of a part's distances; of a late activate only where there are any."""
    return "" if name.startswith("late.") and not timings.late else str(attrgetter(name)(timings))


def _links(*_):
    """What each link carries, and the ports that it takes at 800 MHz."""
    rows = [
        "| link | reads bring, GB/s | writes take, GB/s | lines read per cycle at 800 MHz | ports |",
        "|---|---:|---:|---:|---:|",
    ]
    for link, rate in RATES.items():
        read, written = (float(r) / 1e9 for r in (rate.read_bytes_per_second, rate.write_bytes_per_second))
        lines = float(lines_per_cycle(link, 800))
        rows.append(
            f"| `{link.name.lower()}` | {read:.1f} | {written:.1f} | {lines:.2f} | {ports(link, 800)} |"
        )
    return "\n".join(rows)


def _models(*_):
    bf16 = FORMATS["bf16"]
    rows = [
        "| model | layers | query / KV heads | head_dim | window | billion parameters | active "
        "| KV KiB a token | GiB at 32K | at 128K | configuration |",
        "|---|---:|---|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for found in map(model, CONFIGS):
        kinds = found.attention
        windows = ", ".join(f"{k.window or 'all'} in {k.count}" for k in kinds)
        shape = kinds[0]
        dims = f"{shape.head_dim}/{shape.value_dim}" if shape.shared_row else str(shape.head_dim)
        cells = (
            f"`{found.name}`",
            *(str(found.layers), f"{shape.q_heads}/{shape.kv_heads}", dims, windows),
            *(f"{count / 1e9:.1f}" for count in (found.parameters, found.active_parameters)),
            f"{found.kv_bytes_per_token(bf16) / 1024:.4g}",
            *(f"{found.kv_bytes(context, bf16) / 2**30:.2f}" for context in (32768, 131072)),
            found.source,
        )
        rows.append(_row(cells))
    return "\n".join(rows)


def _gpus(*_):
    rows = [
        "| GPU | memory, GiB | GB/s | share of it | launch, us | bf16, TFLOPS | to the host, GB/s | to peers "
        "| W | source |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for gpu in GPUS.values():
        cells = (
            f"`{gpu.name}`",
            f"{gpu.memory_bytes.value / 2**30:.1f}",
            f"{gpu.bandwidth.value / 1e9:,.0f}",
            f"{gpu.attention_efficiency.value:.3f} ({gpu.attention_efficiency.sure})",
            f"{gpu.attention_launch_s.value * 1e6:g} ({gpu.attention_launch_s.sure})",
            f"{gpu.flops.value / 1e12:g}",
            *(f"{rate.value / 1e9:g}" for rate in (gpu.host_link, gpu.peer_link)),
            f"{gpu.power_w.value:g}",
            gpu.bandwidth.source,
        )
        rows.append(_row(cells))
    return "\n".join(rows)


def _accuracy(*_):
    """Errors of the timing model by part and kind, of workloads that were fitted and that were not."""
    found = [errors(m for m in measurements() if m.calibration is fitted) for fitted in (True, False)]
    rows = [
        "| part | units at | workloads | fitted to: how many | mean error | largest "
        "| not fitted to: how many | mean error | largest |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for key in sorted({*found[0], *found[1]}):
        cells = list(key)
        for of_set in found:
            one = of_set.get(key)
            cells += (
                [str(one.count), f"{100 * one.mean:.1f} %", f"{100 * one.largest:.1f} %"] if one else [""] * 3
            )
        rows.append(_row(cells))
    return "\n".join(rows)


def _workloads(*_):
    """Every workload whose cycles were measured, those that were fitted apart."""
    rows = [
        "| part | units at | queries kept | jobs | rows | query heads | head_dim | page rows | RTL | model "
        "| error | fitted to |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for one in sorted(measurements(), key=lambda m: (not m.calibration, m.config["dram"], m.cycles)):
        work = one.workload
        numbers = (
            one.config["queries"],
            work["batch"] * work["kv_heads"],
            *(work[name] for name in ("rows", "group", "head_dim", "page_rows")),
        )
        cells = (
            one.config["dram"],
            one.config["placement"],
            *map(str, numbers),
            f"{one.cycles:,}",
            f"{one.model_cycles:,.0f}",
            f"{100 * one.error:+.1f} %",
            "yes" if one.calibration else "no",
        )
        rows.append(_row(cells))
    return "\n".join(rows)


def _published(*_):
    rows = [
        "| what | theirs | ours | unit | difference | source | note |",
        "|---|---:|---:|---|---:|---|---|",
    ]
    rows += [
        f"| {one.what} | {one.theirs:.4g} | {one.ours:.4g} | {one.unit} | {100 * one.difference:+.1f} % "
        f"| {one.source} | {one.note} |"
        for one in comparisons()
    ]
    return "\n".join(rows)


def _energies(*_):
    """Every figure of the energy model and of the round trip, with its band."""
    figures = [
        (f"{dram.name.lower()}, {name.replace('_w', ' power').replace('_', ' ')}", value)
        for dram, of_part in energy.DRAMS.items()
        for name, value in vars(of_part).items()
        if value.value
    ]
    figures += [
        (name.removesuffix("_W").removesuffix("_S").replace("_", " ").lower(), value)
        for module in (energy, setup)
        for name, value in vars(module).items()
        if name[0].isupper() and isinstance(value, Value)
    ]
    rows = ["| event | value | low | high | unit | source | sure |", "|---|---:|---:|---:|---|---|---|"]
    for name, value in figures:
        band = value.band
        numbers = " | ".join(f"{number:.4g}" for number in (band.mid, band.low, band.high))
        rows.append(f"| {name} | {numbers} | {value.unit} | {value.source} | {value.sure} |")
    return "\n".join(rows)


def _presets(*_):
    """Every preset, and what a row of head_dim 128 takes."""
    rows = [
        "| preset | elements | scales along the row | scale per head | rule | bits an element | bytes a row "
        "| rows a line |",
        "|---|---|---|---|---|---:|---:|---:|",
    ]
    for preset in FORMAT_PRESETS.values():
        row = preset.k
        cells = (
            f"`{preset.name}`",
            row.element,
            f"{row.scale}, {row.block or 'the whole row'}" if row.scale else "",
            "float32" if row.head_scale else "",
            row.rule.value,
            f"{row.bits_per_element(128):.4g}",
            str(row.row_bytes(128)),
            str(row.rows_per_line(128)),
        )
        rows.append(_row(cells))
    return "\n".join(rows)


TABLES = {
    "layout": _layout,
    "block": _block,
    "enum": _enum,
    "config": _config,
    "dram": _dram,
    "densities": _densities,
    "frames": _frames,
    "links": _links,
    "registers": _registers,
    "models": _models,
    "gpus": _gpus,
    "accuracy": _accuracy,
    "published": _published,
    "workloads": _workloads,
    "energies": _energies,
    "presets": _presets,
}
