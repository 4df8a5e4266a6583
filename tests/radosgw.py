"""A real S3 server for tests: Ceph's radosgw with one monitor and one store in memory, on loopback.

    python -m tests.radosgw        # runs one until Ctrl-C and prints the variables that point the AWS chain at it

Debian: apt-get install --no-install-recommends ceph-mon ceph-osd radosgw ceph-common. Options as in the manuals of
ceph.conf(5) and https://docs.ceph.com/en/pacific/radosgw/config-ref/. Nothing of it outlives its parent.
"""

import ctypes
import json
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ACCESS_KEY, SECRET_KEY, REGION = "radosgw-access", "radosgw-secret-0123456789", "us-east-1"
PACKAGES = "ceph-mon ceph-osd radosgw ceph-common"
_PROGRAMS = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "ceph", "ceph-authtool", "monmaptool")
_PR_SET_PDEATHSIG = 1
_CONFIG = """
[global]
fsid = {fsid}
mon initial members = a
mon host = [v2:127.0.0.1:{mon_port}]
ms bind msgr1 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
run dir = {folder}
admin socket =
pid file =
log file = {folder}/$name.log
crash dir = {folder}
keyring = {folder}/keyring
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
[mon]
mon data = {folder}/mon
mon data avail crit = 1
paxos propose interval = 0.05
paxos min wait = 0.01
mon cluster log file = {folder}/cluster.log
[osd]
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 2147483648
osd class load list = *
osd class default list = *
[client.rgw]
ms mon client mode = crc
rgw data = {folder}/rgw
rgw enable apis = s3
rgw frontends = beast endpoint=127.0.0.1:{port} ssl_endpoint=127.0.0.1:{tls_port} \
ssl_certificate={folder}/tls.crt ssl_private_key={folder}/tls.key tcp_nodelay=1
rgw thread pool size = 64
rgw gc obj min wait = 1
rgw gc processor period = 2
rgw gc processor max time = 2
"""


def missing() -> str:
    """Why it cannot run here; empty when it can."""
    absent = [program for program in _PROGRAMS if shutil.which(program) is None]
    return f"no {', '.join(absent)}: apt-get install --no-install-recommends {PACKAGES}" if absent else ""


@contextmanager
def running(folder: Path) -> Iterator[dict[str, str]]:
    """A server with one user and no bucket. Yields variables of the AWS chain, and TLS_ENDPOINT and TLS_CA beside them.

    Raises RuntimeError, with the end of the server's logs, when it does not come up.
    """
    mon_port, port, tls_port = _free_ports(3)
    config = folder / "ceph.conf"
    config.write_text(
        _CONFIG.format(fsid=uuid.uuid4(), folder=folder, mon_port=mon_port, port=port, tls_port=tls_port).lstrip()
    )
    for name in ("mon", "osd", "rgw"):
        (folder / name).mkdir()
    started: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> None:
        with (folder / f"{command[0]}.out").open("wb") as output:
            started.append(
                subprocess.Popen(
                    [*command, "-c", str(config), "-f"],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    preexec_fn=_die_with_parent,
                )
            )

    def call(*command: str) -> str:
        done = subprocess.run([*command, "-c", str(config)], capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
        return done.stdout

    def until(holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 60
        while not holds():
            if time.monotonic() > deadline or any(process.poll() is not None for process in started):
                logs = [path.read_text(errors="replace")[-1500:] for path in sorted(folder.glob("*.out"))]
                raise RuntimeError(f"radosgw: {what} did not come up\n" + "\n".join(logs))
            time.sleep(0.05)

    def osd_is_up() -> bool:
        return bool(json.loads(call("ceph", "osd", "stat", "-f", "json"))["num_up_osds"])

    try:
        _make_certificate(folder)
        call("ceph-authtool", "--create-keyring", f"{folder}/keyring", "--gen-key", "-n", "client.admin")
        fsid = config.read_text().split("fsid = ")[1].split()[0]
        address = f"[v2:127.0.0.1:{mon_port}]"
        call("monmaptool", "--create", "--clobber", "--fsid", fsid, "--addv", "a", address, f"{folder}/monmap")
        call("ceph-mon", "--mkfs", "-i", "a", "--monmap", f"{folder}/monmap", "--keyring", f"{folder}/keyring")
        start("ceph-mon", "-i", "a")
        osd = str(uuid.uuid4())
        until(lambda: _accepts(mon_port), "ceph-mon")
        call("ceph", "osd", "new", osd)
        call("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        start("ceph-osd", "-i", "0")
        until(osd_is_up, "ceph-osd")
        keys = (f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}")
        call("radosgw-admin", "user", "create", "--uid=test", "--display-name=test", *keys)
        start("radosgw", "-n", "client.rgw")
        until(lambda: _accepts(port) and _accepts(tls_port), "radosgw")
        nowhere = str(folder / "no-such-file")
        yield {
            "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_CONFIG_FILE": nowhere,
            "AWS_SHARED_CREDENTIALS_FILE": nowhere,
            "AWS_EC2_METADATA_DISABLED": "true",
            "TLS_ENDPOINT": f"https://127.0.0.1:{tls_port}",
            "TLS_CA": f"{folder}/tls.crt",
        }
    finally:
        for process in reversed(started):
            process.kill()  # it holds nothing that anyone wants back
            process.wait()


def _make_certificate(folder: Path) -> None:
    """One for 127.0.0.1 that is its own authority."""
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/CN=posttrain test"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", f"{folder}/tls.key", "-out", f"{folder}/tls.crt"]
    subprocess.run([*command, *names], check=True, capture_output=True)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_ports(num: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch, running(Path(scratch)) as environment:
        for name, value in environment.items():
            print(f"export {name}={value}", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
