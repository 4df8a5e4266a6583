"""Linux isolation through libc: namespaces, a minimal read-only root, dropped privileges, resource limits.

Sources: the man pages namespaces(7), user_namespaces(7), pivot_root(2), mount_setattr(2), capabilities(7).
Every function acts on the calling process, which must have one thread, and raises OSError naming the call.
"""

import ctypes
import os
import platform
import resource
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
MIB = 1 << 20
WORKDIR = "/tmp"
INNER_ID = 1000  # the uid and gid that a program sees; never 0

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = (
    1, 2, 4, 8, 32, 4096, 16384, 1 << 18,
)  # fmt: skip
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_PR_SET_CHILD_SUBREAPER, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 36, 47, 4
_CAPABILITY_VERSION_3 = 0x20080522
_ARM = platform.machine() == "aarch64"
_SYS_CLOSE_RANGE = 436
_SYS_PIVOT_ROOT, _SYS_CAPSET, _SYS_MOUNT_SETATTR = (41, 91, 442) if _ARM else (155, 126, 442)
_FIRST_SPARE_USER, _NOBODY = 0x70000000, 65534

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, call: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def rejoin(flag: int) -> None:
    """setns to the calling process's own namespace: for NEWNS this also leads out of a chroot."""
    pidfd = os.pidfd_open(os.getpid())
    try:
        _check(_libc.setns(pidfd, flag), f"setns({flag:#x})")
    finally:
        os.close(pidfd)


def mount(source: str, target: str | Path, kind: str = "", flags: int = 0, data: str = "") -> None:
    result = _libc.mount(
        source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), data.encode() if data else None
    )
    _check(result, f"mount({kind or source} on {target})")


def close_descriptors(first: int, last: int = 0x7FFFFFFF) -> None:
    """close_range(2), whatever the C library that this interpreter was built against."""
    _check(_libc.syscall(_SYS_CLOSE_RANGE, ctypes.c_uint(first), ctypes.c_uint(last), 0), "close_range")


def die_with_parent(signal_number: int) -> None:
    """The kernel signals this process when the thread that forked it ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def adopt_orphans() -> None:
    """Orphaned descendants become children of this process instead of the machine's init."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl(PR_SET_CHILD_SUBREAPER)")


def map_own_ids() -> None:
    """In a new user namespace: the user who made it is INNER_ID there, nobody else exists, and none is made below."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{INNER_ID} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{INNER_ID} {gid} 1")
    with suppress(OSError):  # read-only in containers; the system call filter says the same
        Path("/proc/sys/user/max_user_namespaces").write_text("0")


# --- the root that programs see ---------------------------------------------------------------------------------


def enter_minimal_root() -> bool:
    """Leave the host's file system for a read-only root that holds shared libraries, the standard library, /dev
    (null, zero, full, random, urandom), /proc and an empty WORKDIR. Needs a new mount namespace and to be pid 1 of
    a pid namespace. Returns whether /proc could be mounted (container runtimes that mask theirs forbid it)."""
    origin = os.open("/", os.O_PATH)
    rejoin(NEWNS)
    mount("", "/", flags=_MS_REC | _MS_PRIVATE)
    os.fchdir(origin)
    os.chroot(".")
    os.close(origin)
    sources = _library_folders()
    root = _mount_point(sources)
    mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,nr_inodes=4k,mode=0755")
    for source in sources:
        _bind(source, root)
    for name in ("null", "zero", "full", "random", "urandom"):
        _bind(Path("/dev", name), root, 0)
    for folder in (WORKDIR, "/proc"):
        (root / folder.lstrip("/")).mkdir()
    has_proc = _try_proc(root / "proc")
    _set_attributes(root, _ATTR_RDONLY | _ATTR_NOSUID)
    _pivot(root)
    return has_proc


def _library_folders() -> list[Path]:
    """Existing folders that hold shared libraries or this interpreter's standard library, none inside another."""
    base = Path(sys.base_prefix)
    wanted = [Path("/lib"), Path("/lib64"), Path("/usr/lib"), Path("/usr/lib64"), base / "lib", base / "lib64"]
    wanted += [Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("platstdlib"))]
    found: list[Path] = []
    for folder in wanted:
        if folder.is_dir() and not any(folder.is_relative_to(other) for other in found):
            found.append(folder)
    return found


def _mount_point(sources: list[Path]) -> Path:
    """A folder to build the new root on, which hides what is in it: none of the sources may be."""
    for folder in map(Path, ("/mnt", "/media", "/srv", "/opt", "/tmp", "/run", "/var", "/home")):
        if folder.is_dir() and not any(source.is_relative_to(folder) for source in sources):
            return folder
    raise OSError("no folder such as /mnt or /media to build the sandbox's root on")


def _bind(source: Path, root: Path, attributes: int = _ATTR_NODEV) -> None:
    target = root / source.relative_to("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        target.symlink_to(source.readlink())
        return
    if source.is_dir():
        target.mkdir()
    else:
        target.touch()
    mount(str(source), target, flags=_MS_BIND | _MS_REC)
    _set_attributes(target, attributes)
    _mask_packages(target)


def _mask_packages(folder: Path) -> None:
    """Installed packages (ours included) are covered by empty folders."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for middle in ("", version, "python3"):
        for name in ("site-packages", "dist-packages"):
            packages = folder / middle / name
            if packages.is_dir():
                mount("tmpfs", packages, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=4k,nr_inodes=2,mode=0755")


def _set_attributes(target: Path, attributes: int) -> None:
    """mount_setattr on the whole tree: only ever adds restrictions, so locked flags are no obstacle."""
    if attributes:
        wanted = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
        result = _libc.syscall(
            _SYS_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(target), _AT_RECURSIVE, wanted, ctypes.c_size_t(32)
        )
        _check(result, f"mount_setattr({target}), which needs Linux 5.12")


def _try_proc(target: Path) -> bool:
    try:
        mount("proc", target, "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    except OSError:
        return False
    return True


def _pivot(root: Path) -> None:
    """pivot_root onto `root` and detach what was there. The file descriptor survives the walk out of a chroot."""
    handle = os.open(root, os.O_PATH)
    rejoin(NEWNS)
    os.fchdir(handle)
    os.close(handle)
    _check(_libc.syscall(_SYS_PIVOT_ROOT, b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount2(old root)")
    os.chdir("/")


def mount_workdir(disk_mib: int, owner: int) -> None:
    """A fresh, empty WORKDIR with caps on bytes and on files (64 a MiB); it vanishes with the mount namespace."""
    data = f"size={disk_mib}m,nr_inodes={64 * disk_mib},mode=0700,uid={owner},gid={owner}"
    mount("tmpfs", WORKDIR, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, data)


def mount_own_proc() -> None:
    """A /proc of this pid namespace and of nothing else; first this process is marked as the one to go when memory
    ends, then it becomes read-only."""
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    mount("proc", "/proc", "proc", flags, "subset=pid")
    Path("/proc/self/oom_score_adj").write_text("1000")
    mount("proc", "/proc", flags=flags | _MS_REMOUNT | _MS_BIND | _MS_RDONLY)


# --- privileges and limits --------------------------------------------------------------------------------------


def forbid_inspection() -> None:
    """Not dumpable: no core dump on the host, no ptrace, no /proc/<pid>/{mem,maps,environ,fd} for others."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")


def forbid_new_privileges() -> None:
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")


def drop_privileges(switch_to: int) -> None:
    """No capability in any set, no way to gain one, and (where `switch_to` is not 0) another user."""
    capability = 0
    while _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    if switch_to:
        os.setgroups([])
        os.setresgid(switch_to, switch_to, switch_to)
        os.setresuid(switch_to, switch_to, switch_to)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_libc.syscall(_SYS_CAPSET, header, (ctypes.c_uint32 * 6)()), "capset")
    forbid_inspection()
    forbid_new_privileges()


def spare_user(pid: int) -> int:
    """A uid that nobody else on the machine uses, or the conventional nobody. Raises OSError where neither is mapped
    in this user namespace."""
    for user in (_FIRST_SPARE_USER + pid, _NOBODY):
        child = os.fork()
        if child == 0:
            try:
                drop_privileges(user)
            except OSError:
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            return user
    raise OSError("this user namespace has no second user to switch to")


def address_space_bytes() -> int:
    """Virtual memory of this process now: the interpreter's share of the limit that a program gets on top."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:  # no /proc here
        return 64 * MIB


def set_limits(wanted: dict[int, int]) -> None:
    """Soft and hard, never above what the hard limit already is."""
    for kind, value in wanted.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
