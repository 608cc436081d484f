"""A real Slurm of one node, started on the loopback interface for the tests and gone after them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

DAEMONS = ("munged", "slurmctld", "slurmd")
CPUS = 4  # of the node, whatever the machine has

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
CredType=cred/munge
# a job that was put back into the queue waits so long; less is refused
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
# what works as root in a container: no cgroups, no accounting
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=10
MaxArraySize=3
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=1000
PartitionName=low Nodes={host} Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes={host} PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str | None:
    """Why no cluster can be started here."""
    if os.geteuid() != 0:
        return "Slurm's daemons are started as root, which this is not"
    missing = [name for name in (*DAEMONS, "sbatch", "srun") if _which(name) is None]
    return f"Slurm is not installed (no {', '.join(missing)}): apt-get install slurm-wlm munge" if missing else None


@contextmanager
def running_cluster(folder: Path) -> Iterator[None]:
    """Start the three daemons with their files below `folder`; SLURM_CONF names the cluster meanwhile."""
    folder.chmod(0o755)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    host = socket.gethostname().split(".")[0]
    controller_port, node_port = _free_ports(2)
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(folder=folder, host=host, controller_port=controller_port, node_port=node_port, cpus=CPUS)
    )
    own = {name: f"{folder}/munged.{name}" for name in ("pid", "log", "seed")}
    munged = [f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket", f"--pid-file={own['pid']}"]
    munged += [f"--log-file={own['log']}", f"--seed-file={own['seed']}", "--num-threads=2", "--force", "--foreground"]
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        stack.enter_context(_daemon("munged", *munged))
        _wait(lambda: (folder / "munge.socket").exists(), "munged")
        stack.enter_context(_daemon("slurmctld", "-D", "-c"))
        stack.enter_context(_daemon("slurmd", "-D", "-N", host))
        stack.callback(_end_jobs)
        _wait(lambda: set(said("sinfo", "--noheader", "--format=%T").split()) == {"idle"}, "Slurm")
        yield


def said(*command: str) -> str:
    """What a command of Slurm prints; nothing when it fails."""
    return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout


def in_queue() -> list[str]:
    """Ids and states of all jobs: `12_0 RUNNING`."""
    return said("squeue", "--noheader", "--array", "--format=%i %T").splitlines()


def _which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@contextmanager
def _daemon(name: str, *arguments: str) -> Iterator[None]:
    process = subprocess.Popen(
        [str(_which(name)), *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _end_jobs() -> None:
    said("scancel", "--user=root", "--full", "--signal=KILL")
    said("scancel", "--user=root")
    deadline = time.monotonic() + 10
    while in_queue() and time.monotonic() < deadline:
        time.sleep(0.1)


def _wait(ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not ready():
        assert time.monotonic() < deadline, f"{what} did not start"
        time.sleep(0.05)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
