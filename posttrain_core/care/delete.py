"""delete: a run is marked as deleted. Its objects go with the next gc, but for those that forks of it need."""

import json
import time

from posttrain_core import layout
from posttrain_core.errors import ConfigError, ObjectNotFound
from posttrain_core.lease import Lease
from posttrain_core.store.protocol import ObjectStore


def delete_run(store: ObjectStore, run: str) -> None:
    """Put the mark down, which keeps the contents of `run.json`, and take `run.json` away: from then on nobody finds
    the run. ConfigError when there is nothing of that name, RunConflict while another process holds it."""
    if all(info.key == layout.lease(run) for info in store.list(layout.run_prefix(run))):
        raise ConfigError(f"no run {run!r} in {store.url}")
    with Lease(store, run) as lease:
        try:
            record = store.get(layout.run_record(run)).decode(errors="replace")
        except ObjectNotFound:  # damaged, a fork that was cut short, or deleted before
            record = ""
        mark = {"deleted": time.strftime("%Y-%m-%d %H:%M:%S%z"), "run.json": record}
        store.put_if_absent(layout.deletion(run), json.dumps(mark).encode())
        lease.check()
        store.delete(layout.run_record(run))
