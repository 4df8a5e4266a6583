"""A system call filter: what no Python program needs, and what kernel exploits start from, is refused.

Numbers are the kernel's (`arch/x86/entry/syscalls/syscall_64.tbl`, `include/uapi/asm-generic/unistd.h`). A call from
a foreign architecture (32-bit on a 64-bit kernel) kills the process; a listed call fails with EPERM; clone3, whose
flags a filter cannot read, fails with ENOSYS so that libc falls back to clone.
"""

import ctypes
import errno
import os
import platform
import struct

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
_CLONE_NAMESPACES = 0x7E020080  # CLONE_NEW{USER,PID,NET,IPC,UTS,CGROUP,NS,TIME}
_SOCKET_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6: useless in an empty network namespace, but ordinary

# name: (x86_64, aarch64); None where the architecture lacks the call.
_DENIED: dict[str, tuple[int | None, int | None]] = {
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "process_madvise": (440, 440),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "userfaultfd": (323, 282),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "personality": (135, 92),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    # Memory that no per-process limit counts.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "vmsplice": (278, 75),
}
_CLONE = (56, 220)
_SOCKET = (41, 198)
_SOCKETPAIR = (53, 199)
_CLONE3 = 435

_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGUMENT_0 = 0, 4, 16
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def build_filter(machine: str = platform.machine()) -> bytes:
    """The BPF program for this architecture, or b"" where the architecture is not known to this module."""
    if machine not in AUDIT_ARCH:
        return b""
    column = 0 if machine == "x86_64" else 1
    code = [
        _op(_LOAD, _OFFSET_ARCH),
        _op(_JUMP_EQUAL, AUDIT_ARCH[machine], 1, 0),
        _op(_RETURN, _KILL),
        _op(_LOAD, _OFFSET_NUMBER),
        _op(_JUMP_GREATER_EQUAL, _X32_BIT, 0, 1),
        _op(_RETURN, _KILL),
        *_if_number(_CLONE3, _op(_RETURN, _ERRNO | errno.ENOSYS)),
        *_if_number(_CLONE[column], *_refuse_namespaces()),
        *_if_number(_SOCKET[column], *_refuse_families()),
        *_if_number(_SOCKETPAIR[column], *_refuse_families()),
    ]
    for numbers in _DENIED.values():
        number = numbers[column]
        if number is not None:
            code += _if_number(number, _op(_RETURN, _ERRNO | errno.EPERM))
    return b"".join([*code, _op(_RETURN, _ALLOW)])


def install_filter(program: bytes) -> None:
    """Apply to this process and all it will start. Needs no_new_privs. Raises OSError."""
    buffer = ctypes.create_string_buffer(program, len(program))
    fprog = _Program(len(program) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(fprog), 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl(PR_SET_SECCOMP): {os.strerror(ctypes.get_errno())}")


def _op(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)


def _if_number(number: int, *then: bytes) -> list[bytes]:
    return [_op(_JUMP_EQUAL, number, 0, len(then)), *then]


def _refuse_namespaces() -> list[bytes]:
    return [
        _op(_LOAD, _OFFSET_ARGUMENT_0),
        _op(_JUMP_ANY_BIT, _CLONE_NAMESPACES, 0, 1),
        _op(_RETURN, _ERRNO | errno.EPERM),
        _op(_RETURN, _ALLOW),
    ]


def _refuse_families() -> list[bytes]:
    allowed = [
        _op(_JUMP_EQUAL, family, len(_SOCKET_FAMILIES) - index, 0) for index, family in enumerate(_SOCKET_FAMILIES)
    ]
    return [
        _op(_LOAD, _OFFSET_ARGUMENT_0),
        *allowed,
        _op(_RETURN, _ERRNO | errno.EPERM),
        _op(_RETURN, _ALLOW),
    ]
