"""Facts about the machine that results depend on; each is cheap to find and none starts a GPU."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata

PACKAGES = ("torch", "triton", "flashinfer-python", "transformers", "numpy")


def installed_version(package: str) -> str | None:
    """The version that pip installed; the package itself is not imported."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def supported_versions(package: str) -> str | None:
    """What pyproject.toml allows of a package, such as ">=3.6,<3.10"; None: anything. Diptych's own metadata
    says so, thus None too where it is not installed."""
    from packaging.requirements import Requirement

    try:
        requirements = map(Requirement, metadata.requires("diptych") or ())
    except metadata.PackageNotFoundError:
        return None
    found = {each.name: str(each.specifier) for each in requirements if each.specifier}
    return found.get(package)


def is_supported(package: str, version: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(supported_versions(package) or "").contains(version, prereleases=True)


def versions() -> dict[str, str]:
    """Python, Diptych and those packages that shape a result and are installed."""
    found = {name: installed_version(name) for name in ("diptych", *PACKAGES)}
    return {"python": platform.python_version()} | {name: v for name, v in found.items() if v is not None}


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def num_cpus() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_tool(*command: str) -> str | None:
    """What a program printed; None where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def facts() -> dict[str, object]:
    """What a result file says about where it was measured."""
    import psutil
    import torch

    gpus = []
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "os": platform.platform(),
        "cpu": cpu_name(),
        "num_cpus": num_cpus(),
        "num_torch_threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus,
        "cuda": torch.version.cuda,
    }
