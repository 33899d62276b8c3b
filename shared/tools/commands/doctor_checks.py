"""The checks of `diptych doctor`: what this machine can run, and why not."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from diptych.shared import hardware, registry
from diptych.shared.loading.model_path import builtin_draft_models, builtin_models

if TYPE_CHECKING:
    import torch

State = Literal["ok", "absent", "problem"]  # absent: optional; problem: something will not work


@dataclass(frozen=True)
class Check:
    """One row of the table: the subject, the finding, and a remedy if needed."""

    area: str
    name: str
    state: State
    found: str
    remedy: str = ""


def examine() -> list[Check]:
    """Run all checks. An unexpected error of a check is reported in its row, because the doctor must work on
    a machine with a broken installation."""
    checks: list[Check] = []
    for probe in PROBES:
        try:
            checks += probe()
        except Exception as error:  # a broken installation may raise anything
            name = probe.__name__.strip("_")
            checks.append(Check(name, name, "problem", f"{type(error).__name__}: {error}"))
    return checks


def as_json(checks: list[Check]) -> dict[str, Any]:
    return {"checks": [asdict(check) for check in checks], "versions": hardware.versions()}


def _system() -> list[Check]:
    return [
        Check("machine", "python", "ok", f"{platform.python_version()} ({sys.executable})"),
        Check("machine", "operating system", "ok", platform.platform()),
        Check("machine", "cpu", "ok", f"{hardware.cpu_name()}, {hardware.num_cpus()} cores"),
    ]


def _memory() -> list[Check]:
    if hardware.installed_version("psutil") is None:
        return [Check("machine", "memory", "problem", "psutil is not installed", "pip install psutil")]
    import psutil

    memory = psutil.virtual_memory()
    return [Check("machine", "memory", "ok", f"{_gib(memory.available)} of {_gib(memory.total)} available")]


def _torch() -> list[Check]:
    if hardware.installed_version("torch") is None:
        return [Check("machine", "torch", "problem", "not installed", "pip install torch")]
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    if torch.backends.mps.is_built():
        build = "with MPS"
    checks = [Check("machine", "torch", "ok", f"{torch.__version__} ({build})")]
    if platform.system() == "Darwin":
        usable = torch.backends.mps.is_available()
        found = "available" if usable else "not available"
        checks.append(Check("machine", "mps", "ok" if usable else "absent", found))
    return checks


def _gpus() -> list[Check]:
    import torch

    driver = hardware.run_tool("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    checks = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            found = (
                f"{properties.name}, sm_{properties.major}{properties.minor}, {_gib(properties.total_memory)}"
            )
            checks.append(Check("gpu", f"cuda:{index}", "ok", found))
        checks.append(Check("gpu", "driver", "ok", driver.splitlines()[0] if driver else "version unknown"))
    elif driver:
        why = "torch is a CPU build" if not torch.version.cuda else "torch cannot use it"
        remedy = "pip install --force-reinstall torch (a build for your CUDA version)"
        checks.append(Check("gpu", "cuda", "problem", f"driver {driver.splitlines()[0]}, but {why}", remedy))
    else:
        checks.append(Check("gpu", "cuda", "absent", "no NVIDIA GPU or no driver"))
    checks.append(_nvcc())
    return checks


def _nvcc() -> Check:
    if shutil.which("nvcc") is None:
        remedy = "only needed where kernels are compiled from CUDA sources"
        return Check("gpu", "nvcc", "absent", "not on PATH", remedy)
    output = hardware.run_tool("nvcc", "--version") or ""
    release = [line.strip() for line in output.splitlines() if "release" in line]
    return Check("gpu", "nvcc", "ok", release[0] if release else "found")


def _packages() -> list[Check]:
    wanted = (
        ("transformers", "problem", "pip install transformers"),
        ("triton", "absent", "pip install -e '.[gpu]' (needs Linux and an NVIDIA GPU)"),
        ("flashinfer-python", "absent", "pip install -e '.[gpu]' (needs Linux and an NVIDIA GPU)"),
    )
    checks = []
    for name, state_if_missing, remedy in wanted:
        version = hardware.installed_version(name)
        if version is None:
            checks.append(Check("packages", name, state_if_missing, "not installed", remedy))  # type: ignore[arg-type]
        elif not hardware.is_supported(name, version):
            supported = hardware.supported_versions(name)
            found = f"{version} is untested; the tested versions are {supported}"
            checks.append(Check("packages", name, "problem", found, f"pip install '{name}{supported}'"))
        else:
            checks.append(Check("packages", name, "ok", version))
    return checks


def _models() -> list[Check]:
    names = builtin_models()
    if not names:
        return [Check("models", "built-in", "problem", "none found", "git checkout -- shared/assets")]
    names += [f"{name} (a speculation head)" for name in builtin_draft_models()]
    return [Check("models", "built-in", "ok", ", ".join(names))]


def _panels() -> list[Check]:
    import torch

    devices = ["cpu"]
    if torch.backends.mps.is_available():
        devices.append("mps")
    if torch.cuda.is_available():
        devices.append("cuda")
    checks = [Check("panels", "reference", "ok", f"runs on {', '.join(devices)}")]
    if "cuda" not in devices:
        checks.append(Check("panels", "optimized", "absent", "needs a CUDA GPU"))
    else:
        checks.append(Check("panels", "optimized", "ok", "runs on cuda"))
    return checks


def _components() -> list[Check]:
    """The default choice for each component, imported as a test."""
    import torch

    panel = "optimized" if torch.cuda.is_available() else "reference"
    return [_component(name, choice, registry.load) for name, choice in registry.select(panel, {}).items()]


def _component(name: str, choice: str, load: Callable[[str, str], object]) -> Check:
    others = [other for other in registry.choices(name) if other != choice]
    found = choice + (f" (also: {', '.join(others)})" if others else "")
    try:
        load(name, choice)
    except Exception as error:  # a user-provided component may raise anything
        return Check("components", name, "problem", f"{found}: {error}")
    return Check("components", name, "ok", found)


def _attention() -> list[Check]:
    """The optimized panel's attention backends, and its default."""
    import torch

    names = [name for name in registry.choices("attention") if name not in registry.PANELS]
    refused = [
        Check("attention", choice, "absent", needed) for choice, needed in registry.UNAVAILABLE.items()
    ]
    if not torch.cuda.is_available():
        absent = [Check("attention", f"attention={name}", "absent", "needs a CUDA GPU") for name in names]
        return absent + refused
    device = torch.device("cuda")
    checks = [_attention_backend(name, device, registry.load) for name in names]
    choice = registry.load("attention", "optimized").choose(device)
    remedy = "another: --use attention=NAME, or PREFILL+DECODE"
    return [*checks, *refused, Check("attention", "the default", "ok", str(choice), remedy)]


def _attention_backend(name: str, device: torch.device, load: Callable[[str, str], Any]) -> Check:
    flag = f"attention={name}"
    try:
        check_device = getattr(load("attention", name), "check_device", None)
        if check_device is not None:
            check_device(device)
    except ValueError as error:
        return Check("attention", flag, "absent", str(error))
    return Check("attention", flag, "ok", "usable")


def _gpu_table() -> list[Check]:
    """The kernel choices measured on this GPU."""
    import torch

    if not torch.cuda.is_available():
        return [Check("gpu table", "tiles of experts", "absent", "needs a CUDA GPU")]
    device = torch.device("cuda", 0)
    is_used, found = registry.load_part("moe_tiles").describe(device)
    linear = registry.load_part("linear_choice").describe(device)
    remedy = "" if is_used else "diptych tune --model MODEL"
    return [
        Check("gpu table", "tiles of experts", "ok" if is_used else "absent", found, remedy),
        Check("gpu table", "linear layers", "ok", linear),
    ]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


PROBES = (
    *(_system, _memory, _torch, _gpus, _packages),
    *(_models, _panels, _components, _attention, _gpu_table),
)
