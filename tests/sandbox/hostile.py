"""Programs that misbehave, and how each must end. All define `attack`; see test_hostile.py for what is checked."""

from dataclasses import dataclass

from posttrain_core.records import ExecutionStatus as Status


@dataclass(frozen=True)
class Hostile:
    """`statuses` are the acceptable ends; `value` is what the one case must return ("" for: nothing)."""

    source: str
    statuses: tuple[Status, ...]
    value: str = ""


def _ends(source: str, *statuses: Status) -> Hostile:
    return Hostile(source, statuses)


def _returns(source: str, value: str) -> Hostile:
    return Hostile(source, (Status.OK,), value)


# Runs the listed attempts (strings of code) and returns those that did not raise OSError.
_ATTEMPTS = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def syscall(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")
def attack():
    succeeded = []
    for attempt in ATTEMPTS:
        try:
            exec(attempt, globals())
        except OSError:
            continue
        succeeded.append(attempt)
    return succeeded
"""


def _all_refused(*attempts: str) -> Hostile:
    return _returns(f"ATTEMPTS = {list(attempts)!r}\n{_ATTEMPTS}", "[]")


TIME, MEMORY, OUTPUT = Status.TIME_LIMIT, Status.MEMORY_LIMIT, Status.OUTPUT_LIMIT
DISK, PROCESSES, ERROR, POLICY = Status.DISK_LIMIT, Status.PROCESS_LIMIT, Status.RUNTIME_ERROR, Status.POLICY

CASES: dict[str, Hostile] = {
    # --- processes
    "fork_bomb": _ends(
        """
import os
def attack():
    while True:
        try: os.fork()
        except OSError: pass
""",
        PROCESSES,
        TIME,
    ),
    "thread_bomb": _ends(
        """
import threading, time
def attack():
    threads = []
    while True:
        threads.append(threading.Thread(target=time.sleep, args=(60,), daemon=True))
        threads[-1].start()
""",
        PROCESSES,
        TIME,
        ERROR,
        MEMORY,
    ),
    "fork_chain": _ends(
        """
import os
def attack():
    while True:
        if os.fork(): os._exit(0)
""",
        ERROR,
        PROCESSES,
    ),
    "zombie_farm": _ends(
        """
import os
def attack():
    while True:
        if os.fork() == 0: os._exit(0)
""",
        PROCESSES,
        TIME,
        ERROR,
    ),
    "daemon_holds_stdout": _returns(
        """
import os, time
def attack():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    return 1
""",
        "1",
    ),
    "ignores_signals": _ends(
        """
import signal, time
def attack():
    for number in range(1, 65):
        try: signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError): pass
    time.sleep(600)
""",
        TIME,
    ),
    "stops_itself": _ends("import os, signal\ndef attack():\n    os.kill(os.getpid(), signal.SIGSTOP)\n", TIME),
    "kills_everyone": _returns(
        """
import os, signal, time
def attack():
    for pid in (1, -1):
        try: os.kill(pid, signal.SIGKILL)
        except OSError: pass
    time.sleep(0.1)
    return 1
""",
        "1",
    ),
    "blocked_read": _ends("import os\ndef attack():\n    os.mkfifo('p')\n    return open('p').read()\n", TIME),
    # --- time
    "one_c_call": _ends("def attack():\n    return len(str(pow(7, 10**8)))\n", TIME),
    "endless_loop_in_module": _ends("while True: pass\ndef attack(): return 1\n", TIME),
    # --- memory
    "memory_bomb": _ends("def attack():\n    held = []\n    while True: held.append(bytearray(1 << 20))\n", MEMORY),
    "memory_bomb_in_children": _ends(
        """
import os, time
def attack():
    for _ in range(6):
        if os.fork() == 0:
            held = [bytearray(b'x') * (40 << 20)]
            time.sleep(600)
    time.sleep(600)
""",
        MEMORY,
    ),
    "one_huge_block": _ends("def attack():\n    return len(bytearray(1 << 50))\n", ERROR, MEMORY),
    "memfd_hoard": _all_refused("os.memfd_create('hoard')"),
    "deep_recursion": _ends("def attack():\n    return attack()\n", ERROR),
    "c_stack_overflow": _ends(
        "import sys\ndef attack():\n    sys.setrecursionlimit(10**9)\n    f = lambda x: [*map(f, [x])]\n    f(1)\n",
        ERROR,
        MEMORY,
    ),
    # --- disk
    "disk_fill": _ends(
        "def attack():\n    for n in range(10**6):\n        open(str(n), 'wb').write(bytes(1 << 20))\n", DISK
    ),
    "inode_fill": _ends("def attack():\n    for n in range(10**6): open(str(n), 'w').close()\n", DISK),
    "sparse_file": _ends("def attack():\n    open('f', 'wb').truncate(1 << 40)\n", ERROR, DISK),
    "deep_folders": _ends(
        "import os\ndef attack():\n    for _ in range(10**6):\n        os.mkdir('d')\n        os.chdir('d')\n", DISK
    ),
    "many_open_files": _ends("def attack():\n    return [open('/dev/null') for _ in range(10**4)]\n", ERROR),
    # --- output
    "stdout_flood": _ends("def attack():\n    while True: print('x' * 1000)\n", OUTPUT),
    "stderr_flood": _ends("import os\ndef attack():\n    while True: os.write(2, b'\\xff' * 4096)\n", OUTPUT),
    "reads_its_own_output_back": _ends(
        """
import os
def attack():
    back = os.open("/proc/self/fd/1", os.O_RDONLY | os.O_NONBLOCK)
    os.fork()
    while True:
        try:
            os.write(1, b"x")
            os.read(back, 100)
        except BlockingIOError:
            pass
""",
        TIME,
        OUTPUT,
        ERROR,  # where the pipe belongs to another user
    ),
    "invalid_utf8": _returns(
        "import os\ndef attack():\n    os.write(1, b'\\xff\\xfe\\x00\\x1b[2J')\n    return 1\n", "1"
    ),
    "returns_flood": _ends("import os\ndef attack():\n    while True: os.write(3, bytes(4096))\n", OUTPUT),
    # --- the results channel
    "forged_frame": _ends(
        'import os\ndef attack():\n    os.write(3, b\'\\0\\0\\0\\x0e["0",true,"42"]\')\n    return 1\n', POLICY
    ),
    "unexpected_case": _ends(
        'import os\ndef attack():\n    os.write(3, b\'\\0\\0\\0\\x0e["7",true,"42"]\')\n    return 1\n', POLICY
    ),
    "garbage_frame": _ends("import os\ndef attack():\n    os.write(3, b'\\0\\0\\0\\x04null')\n    return 1\n", POLICY),
    "cut_frame": _ends("import os\ndef attack():\n    os.write(3, b'\\0\\0\\xff')\n    os._exit(0)\n", POLICY),
    "both_sides_of_a_fork_return": _ends("import os\ndef attack():\n    os.fork()\n    return 1\n", POLICY, Status.OK),
    "closes_the_channel": _ends("import os\ndef attack():\n    os.close(3)\n    return 1\n", ERROR),
    "exits": _ends("import sys\ndef attack():\n    sys.exit(0)\n", ERROR),
    "exits_at_once": _ends("import os\ndef attack():\n    os._exit(0)\n", ERROR),
    "aborts": _ends("import os\ndef attack():\n    os.abort()\n", ERROR),
    "equal_to_everything": _ends(
        "class Equal:\n    def __eq__(self, other): return True\ndef attack():\n    return Equal()\n", ERROR
    ),
    "int_subclass": _ends("class Int(int): pass\ndef attack():\n    return Int(1)\n", ERROR),
    "long_integer": _ends("def attack():\n    return 1 << 3_400_000\n", ERROR),
    "deep_value": _ends(
        "def attack():\n    value = []\n    for _ in range(10**5): value = [value]\n    return value\n", ERROR
    ),
    "cyclic_value": _ends("def attack():\n    value = []\n    value.append(value)\n    return value\n", ERROR),
    "wide_value": _ends(
        "def attack():\n    value = [1]\n    for _ in range(30): value = [value, value]\n    return value\n", ERROR
    ),
    "not_finite": _ends("def attack():\n    return float('nan')\n", ERROR),
    # --- reaching out
    "writes_outside": _all_refused(
        *(
            f"open({path!r}, 'w')"
            for path in ("/x", "/usr/lib/x", "/lib/x", "/etc/passwd", "/dev/x", "/proc/sys/vm/swappiness")
        ),
        "open(os.__file__, 'a')",
        "os.remove(os.__file__)",
        "open('/proc/sysrq-trigger', 'w')",
        "open('/proc/1/mem', 'r+b')",
    ),
    "reads_host_files": _all_refused(
        *(f"os.stat({path!r})" for path in ("/etc", "/home", "/var", "/run", "/sys", "/mnt", "/bin/sh", "/usr/bin")),
        *(f"os.stat('/proc/{name}')" for name in ("kcore", "sys", "keys", "kallsyms", "sysrq-trigger", "meminfo")),
        "open('/proc/1/environ').read()",
        "os.readlink('/proc/1/fd/0')",
        "os.readlink('/proc/1/cwd')",
        "os.readlink('/proc/1/exe')",
    ),
    "sees_only_itself": _returns(
        "import os\ndef attack():\n    return sorted(n for n in os.listdir('/proc') if n.isdigit())\n",
        '["1","2"]',
    ),
    "only_plain_devices": _returns(
        "import os\ndef attack():\n    return sorted(os.listdir('/dev'))\n", '["full","null","random","urandom","zero"]'
    ),
    "our_packages_are_absent": _returns(
        """
import importlib, os, sysconfig
def attack():
    found = []
    for name in ("posttrain_core", "pytest", "numpy", "pip", "yaml"):
        try: importlib.import_module(name)
        except ImportError: continue
        found.append(name)
    return found
""",
        "[]",
    ),
    "devices": _all_refused("os.mknod('d', 0o20666, os.makedev(1, 1))", "open('/dev/mem')", "open('/dev/tty')"),
    "mounts": _all_refused(
        "syscall(165 if os.uname().machine == 'x86_64' else 40, b'tmpfs', b'/tmp', b'tmpfs', 0, 0)",
        "syscall(166 if os.uname().machine == 'x86_64' else 39, b'/tmp', 0)",
        "syscall(428, -100, b'/', 1)",
        "os.chroot('/tmp')",
        "os.sethostname('x') if hasattr(os, 'sethostname') else syscall(170, b'x', 1)",
    ),
    "namespaces": _all_refused(
        *(
            f"syscall(272 if os.uname().machine == 'x86_64' else 97, {flag})"
            for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000)
        ),
        "syscall(56 if os.uname().machine == 'x86_64' else 220, 0x10000011, 0, 0, 0, 0)",
        "syscall(435, 0, 0)",
        "syscall(308 if os.uname().machine == 'x86_64' else 268, 0, 0)",
    ),
    "kernel_interfaces": _all_refused(
        *(
            f"syscall({x86} if os.uname().machine == 'x86_64' else {arm}, 0, 0, 0, 0, 0)"
            for x86, arm in (
                *((101, 117), (310, 270), (311, 271), (248, 217), (250, 219), (321, 280), (298, 241)),
                *((425, 425), (323, 282), (304, 265), (246, 104), (29, 194), (438, 438), (175, 105)),
            )
        ),
        "socket.socket(40, socket.SOCK_STREAM)",  # AF_VSOCK
        "socket.socket(38, socket.SOCK_SEQPACKET)",  # AF_ALG
        "socket.socket(16, socket.SOCK_RAW, 0)",  # AF_NETLINK
        "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    ),
    "privileges": _returns(
        """
import os
def attack():
    status = dict(line.split(':', 1) for line in open('/proc/self/status'))
    zero = [int(status[name], 16) for name in ('CapEff', 'CapPrm', 'CapInh', 'CapBnd', 'CapAmb')]
    refused = 0
    for call in (os.setuid, os.setgid):
        try: call(0)
        except OSError: refused += 1
    return [zero, int(status['NoNewPrivs']), int(status['Seccomp']), os.getuid() != 0, os.getgroups(), refused]
""".replace("os.getgroups()", "len(os.getgroups()) * (os.getuid() != 1000)"),
        "[[0,0,0,0,0],1,2,true,0,2]",
    ),
    "inherited_descriptors": _returns(
        """
import os
def attack():
    found = []
    for fd in range(4, 4096):
        try: os.fstat(fd)
        except OSError: continue
        found.append(fd)
    return [found, os.read(0, 10) == b'', os.isatty(0), os.isatty(1)]
""",
        "[[],true,false,false]",
    ),
    "limits_cannot_be_raised": _returns(
        """
import resource
def attack():
    raised = []
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NOFILE, resource.RLIMIT_CORE):
        try: resource.setrlimit(kind, (-1, -1))
        except (OSError, ValueError): continue
        raised.append(kind)
    return raised
""",
        "[]",
    ),
    "network": _all_refused(
        *(
            f"socket.create_connection(({host!r}, 80), timeout=1)"
            for host in ("127.0.0.1", "::1", "169.254.169.254", "fd00:ec2::254", "1.1.1.1", "example.com")
        ),
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('1.1.1.1', 53))",
    ),
}
