"""What this machine offers for isolation, for `posttrain doctor`: each feature is tried, not guessed."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

from posttrain_core.errors import SandboxUnavailable
from posttrain_core.sandbox import namespaces, seccomp
from posttrain_core.sandbox.cgroups import make_cgroup
from posttrain_core.sandbox.embedded import EmbeddedSandbox

_NAMESPACES = {
    "user": namespaces.NEWUSER,
    "mount": namespaces.NEWNS,
    "pid": namespaces.NEWPID,
    "network": namespaces.NEWNET,
    "ipc": namespaces.NEWIPC,
    "uts": namespaces.NEWUTS,
    "cgroup": namespaces.NEWCGROUP,
}
_SYSCTLS = (
    "user/max_user_namespaces",
    "kernel/unprivileged_userns_clone",
    "kernel/apparmor_restrict_unprivileged_userns",
)
_TRY_UNSHARE = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(int(sys.argv[1])) != 0)"


def probe() -> dict[str, object]:
    """By name: the kernel, each namespace (inside a new user namespace), seccomp, cgroup version (0 is none), and
    `label`, the isolation that executions would get ("" with `problem` where there is none). Starts processes."""
    found: dict[str, object] = {"kernel": f"{platform.system()} {platform.release()}", "machine": platform.machine()}
    found |= {f"{name}_namespace": _can_unshare(flag | namespaces.NEWUSER) for name, flag in _NAMESPACES.items()}
    found |= {f"sysctl {name}": _sysctl(name) for name in _SYSCTLS if _sysctl(name)}
    cgroup = make_cgroup()
    if cgroup:
        cgroup.remove()
    found["cgroup_version"] = cgroup.version if cgroup else 0
    found["seccomp_filter"] = bool(seccomp.build_filter())
    found["bubblewrap"] = shutil.which("bwrap") or ""  # not needed: the launcher here does its work
    found["label"], found["problem"] = _label()
    return found


def _label() -> tuple[str, str]:
    try:
        sandbox = EmbeddedSandbox(workers=1)
    except SandboxUnavailable as error:
        return "", str(error)
    sandbox.close()
    return sandbox.isolation, ""


def _can_unshare(flags: int) -> bool:
    return subprocess.run([sys.executable, "-I", "-S", "-c", _TRY_UNSHARE, str(flags)], check=False).returncode == 0


def _sysctl(name: str) -> str:
    path = Path("/proc/sys") / name
    return path.read_text().strip() if path.exists() else ""
