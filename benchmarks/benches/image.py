"""Measure the build of a template from an OCI image, compared with the commands that it cannot do without."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.context import DISK_MB, MEMORY_MB, Context, KvmXfs
from benchmarks.measure import Result, Target
from sandbox_gateway.hosts.kvm_xfs.template.debian import unpack_debian
from sandbox_gateway.recipes import Recipe
from sandbox_gateway.records import Resources, Snapshot
from tests.support import session
from tests.support.images import make_layer_of_tree, write_layout

_TIMEOUT_SECONDS = 600
_PARTS = {
    "skopeo": "`skopeo copy`",
    "umoci": "`umoci raw unpack`",
    "mke2fs": "`mke2fs -d`",
    "boot": "QEMU boots the disk, until the agent in it answers",
}
_STAGES = {
    "disk": ("", "the disk of the template"),
    "machine": ("booting ", "the boot of its machine, until the agent responds"),
    "interpreter": ("starting the code interpreter", "the start of the code interpreter"),
    "capture": ("capturing ", "the capture of its disk and memory"),
}
"""``{part: (beginning of the line with which it starts, title)}``"""


class Image:
    name = "image"
    title = "a template from an image"

    def run(self, ctx: Context) -> Result:
        rounds = ctx.choose(full=5, quick=1)
        samples: dict[str, list[float]] = defaultdict(list)
        host = ctx.kvm_xfs
        directory = host.mount_point / "image"
        directory.mkdir()
        layout = _write_image(directory)
        size_mb = sum(path.stat().st_size for path in (layout / "blobs/sha256").iterdir()) >> 20
        result = Result(self.name, self.title, {"rounds": rounds, "image_mb": size_mb})
        with ctx.showing_progress("builds", rounds) as steps:
            for number in range(rounds):
                _measure_disk_floor(layout, directory / "floor", samples)
                _measure_build(host, layout, f"image-{number}", samples)
                steps.advance()
        floor_title = f"floor: the commands, one after another (image of {size_mb} MB)"
        result.add_measure("floor", floor_title, samples=samples["floor"])
        result.add_parts("floor", _PARTS, samples)
        result.add_measure(
            "init", "for comparison: QEMU and the kernel until it looks for init", samples=samples["init"]
        )
        target = Target("ratio", 1.3)
        result.add_measure("build", "build, until it was ready", samples=samples["build"], floor="floor", target=target)
        result.add_parts("build", {part: title for part, (_, title) in _STAGES.items()}, samples)
        result.add_measure("floor_disk", "floor: the first three commands", samples=samples["floor_disk"])
        title = "the disk of the template, compared with them"
        result.add_measure("disk", title, samples=samples["disk"], floor="floor_disk", target=target)
        return result


def _write_image(directory: Path) -> Path:
    """Write an OCI layout whose only layer is a Debian tree. Returns its path."""
    work = directory / "work"
    tree = work / "tree"
    tree.mkdir(parents=True)
    asyncio.run(unpack_debian(Recipe(), tree, work, session.get_cache_dir(), lambda line: None))
    layout = write_layout(directory / "layout", [make_layer_of_tree(tree, ["."])])
    shutil.rmtree(work)
    return layout


def _measure_disk_floor(layout: Path, directory: Path, samples: dict[str, list[float]]) -> None:
    directory.mkdir()
    image, copy, tree = directory / "rootfs.img", f"oci:{directory}/layout:image", directory / "tree"
    with image.open("wb") as file:
        file.truncate(DISK_MB << 20)
    times = {
        "skopeo": _time_command(["skopeo", "copy", "-q", f"oci:{layout}:test", copy]),
        "umoci": _time_command(["umoci", "raw", "unpack", "--image", f"{directory}/layout:image", tree]),
        "mke2fs": _time_command(["mke2fs", "-q", "-F", "-t", "ext4", "-d", tree, image]),
    }
    for part, ms in times.items():
        samples[part].append(ms)
    samples["floor_disk"].append(sum(times.values()))
    shutil.rmtree(directory)


def _measure_boot_floor(host: KvmXfs, template: Snapshot, samples: dict[str, list[float]]) -> None:
    """Boot the finished disk without a gateway: a template is captured when its agent answers."""
    with host.raw_qemu(template) as raw:
        (machine,) = raw.prepare_machines(1)
        ms, _ = machine.boot_until_init()
        samples["init"].append(ms)
        (machine,) = raw.prepare_machines(1)
        samples["boot"].append(machine.start_and_ping(boot=True))
    samples["floor"].append(samples["floor_disk"][-1] + samples["boot"][-1])


def _time_command(argv: Sequence[str | Path]) -> float:
    start_time = time.perf_counter()
    subprocess.run(argv, check=True, timeout=_TIMEOUT_SECONDS, stdout=subprocess.DEVNULL)
    return (time.perf_counter() - start_time) * 1000


def _measure_build(host: KvmXfs, layout: Path, name: str, samples: dict[str, list[float]]) -> None:
    resources = Resources(memory_mb=MEMORY_MB, disk_mb=DISK_MB)
    recipe = Recipe(source="image", image=f"oci:{layout}:test", resources=resources)
    times = [time.perf_counter()]
    build = host.live.do(host.live.engine.templates.build(name, recipe))

    async def follow() -> list[str]:
        lines = []
        async for line in build.follow():
            lines.append(line)
            times.append(time.perf_counter())
        return lines

    lines = ["", *host.live.do(follow(), timeout=_TIMEOUT_SECONDS)]
    if build.status != "ready":
        raise RuntimeError("the template could not be built:\n" + "\n".join(lines[-20:]))
    starts = [
        next(moment for moment, line in zip(times, lines, strict=True) if line.startswith(beginning))
        for beginning, _ in _STAGES.values()
    ]
    ends = [*starts[1:], times[-1]]
    for part, start, end in zip(_STAGES, starts, ends, strict=True):
        samples[part].append((end - start) * 1000)
    samples["build"].append((times[-1] - times[0]) * 1000)
    _measure_boot_floor(host, host.live.engine.templates.get(name), samples)
    host.live.do(host.live.engine.snapshots.delete(name))
