"""Addresses at which the processes of an engine listen."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from diptych.shared.engine.llm import LLM
from diptych.shared.parallel import meeting
from tests.parallel.test_processes import descendants

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


@pytest.mark.parametrize(
    ("num_local", "interface"), [(None, LOOPBACK), ("2", LOOPBACK), ("1", "eth7")], ids=["own", "one", "two"]
)
def test_an_inherited_interface_is_for_several_computers(
    num_local: str | None, interface: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in meeting.LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    if num_local is not None:
        launched = dict.fromkeys(meeting.LAUNCHED, "0") | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": num_local}
        for name, value in launched.items():
            monkeypatch.setenv(name, value)
    for name in variables:
        monkeypatch.setenv(name, "eth7")
    meeting.use_loopback()
    assert [os.environ[name] for name in variables] == [interface] * 2


def listening(pids: list[int]) -> set[str]:
    """Addresses, in hexadecimal, at which these processes listen."""
    inodes = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(file).removeprefix("socket:[").rstrip("]"))
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] == "0A" and parts[9] in inodes:
                found.add(parts[1])
    return found


MODES: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "pp": {"pp": 2},
    "dp": {"dp": 2},
    "dp_attention": {"dp": 2, "dp_attention": True, "model": "tiny-moe"},
    "disaggregation": {"disaggregation": True},
    "shared_memory": {"disaggregation": True, "use": {"transport": "shared_memory"}},
}


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    "mode", ["tp", *(pytest.param(each, marks=pytest.mark.full) for each in MODES if each != "tp")]
)
def test_no_process_listens_beyond_loopback(
    mode: str, monkeypatch: pytest.MonkeyPatch, spawned_ranks: None
) -> None:
    """Whatever interface the environment names. One that sends garbage to what does listen ends nothing."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, socket.if_nameindex()[-1][1])
    before = listening([os.getpid(), *descendants(os.getpid())])  # helpers of earlier tests, too
    flags = {
        "model": "tiny-dense",
        "panel": "reference",
        "device": "cpu",
        "max_total_tokens": 1024,
        **MODES[mode],
    }
    llm = LLM(**flags)
    expected = llm.generate("What is 12 + 30?", temperature=0, max_tokens=8, progress=False).text
    found = listening([os.getpid(), *descendants(os.getpid())]) - before
    assert all(address.startswith("0100007F:") for address in found), found
    assert bool(found) == (mode in ("tp", "pp", "dp_attention"))  # gloo
    for address in found:
        for data in (b"", os.urandom(1000), bytes(1000), b"\xff" * 1000):
            port = int(address.rpartition(":")[2], 16)
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(data)
    assert llm.generate("What is 12 + 30?", temperature=0, max_tokens=8, progress=False).text == expected
